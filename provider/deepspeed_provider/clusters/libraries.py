# SPDX-License-Identifier: Apache-2.0
"""What the task of a fine-tune installs on a runtime, and on which runtimes it trains at all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from deepspeed_provider.clusters.prices import packaged
from deepspeed_provider.clusters.runtimes import Runtime, runtime, runtimes
from deepspeed_provider.errors import SpecError

# Of the packages that a runtime brings: from these on, ``training`` runs on them as they are.
LEAST: Final = {"transformers": (4, 50), "deepspeed": (0, 16)}
LEAST_TEXT: Final = "transformers 4.50 and DeepSpeed 0.16"


@dataclass(frozen=True, kw_only=True)
class Library:
    """A package that a runtime lacks, in the version that goes with what it has.

    Attributes:
        method: of the training that needs it.
        date: of its release.
    """

    spark_version: str
    method: str
    package: str
    version: str
    source: str
    date: str

    @property
    def in_task(self) -> dict[str, Any]:
        """As the Jobs API has it."""
        return {"pypi": {"package": f"{self.package}=={self.version}"}}


@cache
def libraries() -> tuple[Library, ...]:
    """All that are known."""
    return tuple(Library(**row) for row in packaged("libraries.csv"))


def task_libraries(spark_version: str, method: str) -> list[dict[str, Any]]:
    """Of a training by ``method``, in the API's shape; none for a runtime that is not known."""
    return [
        library.in_task
        for library in libraries()
        if library.spark_version == spark_version and library.method == method
    ]


def require_training(spark_version: str, field: str) -> None:
    """Raises :class:`SpecError`, which calls it ``field``, for a runtime that is unknown, or too old to train on."""
    found = runtime(spark_version)
    if _trains(found):
        return
    newest = training_runtimes()[0]
    text = f"holds transformers {found.transformers} and DeepSpeed {found.deepspeed}; the training needs {LEAST_TEXT}"
    works = f"Plan with spark_version {newest.spark_version!r}."
    raise SpecError.of(field, spark_version, text, works)


def training_runtimes() -> list[Runtime]:
    """Those with long-term support on which the training runs, the newest first."""
    return [each for each in reversed(runtimes()) if each.supported_until and _trains(each)]


def _trains(found: Runtime) -> bool:
    return all(_version(getattr(found, package)) >= version for package, version in LEAST.items())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
