# SPDX-License-Identifier: Apache-2.0
"""Calling functions of this package in the Python workers of a session's cluster."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .code_archive import build_code_archive, training_code
from .spark_kinds import is_client

if TYPE_CHECKING:
    import pandas
    from pyspark.sql import SparkSession


def ship_code(spark: SparkSession) -> None:
    """Adds this package to the session: the workers may have neither the provider nor a checkout."""
    if not is_client(spark):
        _add_to_driver(spark)
        return
    with tempfile.TemporaryDirectory() as scratch:
        spark.addArtifacts(str(build_code_archive(training_code(), Path(scratch))), pyfile=True)


def _add_to_driver(spark: SparkSession) -> None:
    """Adds the archive that this package was imported from, if it was: code of the user's own may be in it too."""
    package = Path(__file__).parents[2]
    # On the driver's own disk, and never removed: executors that come later fetch it from there.
    folder = Path(tempfile.gettempdir(), f"deepspeed-provider-code-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        archive = package if package.is_file() else build_code_archive(training_code(), Path(scratch))
        target = folder / archive.name
        if not target.exists():
            _put(archive, target)
    spark.sparkContext.addPyFile(str(target))
    # Workers are used again, with what they have imported: those that have other code are not for this one.
    spark.sparkContext.environment["DEEPSPEED_PROVIDER_CODE"] = target.name


def _put(source: Path, target: Path) -> None:
    """Whole at once: another run may be doing the same."""
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as scratch:
        scratch.write(source.read_bytes())
    Path(scratch.name).replace(target)


def call(spark: SparkSession, function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function`` of a shipped module returns (JSON-able) when one Python worker calls it."""

    def answer(batches: Iterator[pandas.DataFrame]) -> Iterator[pandas.DataFrame]:
        import pandas

        for _ in batches:
            yield pandas.DataFrame({"answer": [json.dumps(function(*arguments))]})

    return json.loads(spark.range(0, 1, 1, 1).mapInPandas(answer, "answer string").collect()[0]["answer"])
