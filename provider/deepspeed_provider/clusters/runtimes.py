# SPDX-License-Identifier: Apache-2.0
"""Databricks' GPU machine-learning runtimes as data: what each of them holds."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

from deepspeed_provider.clusters.prices import packaged
from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.sizing.options import Attention


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One runtime; versions are those of its packages, empty where it has none, or none was found.

    Attributes:
        spark_version: its key, as a cluster is asked for it.
        flash_attn_torch: for which torch its flash-attn was built, where that is another than it has.
        supported_until: the end of long-term support; empty for a runtime without it.
        date: when the list of packages was published.
    """

    spark_version: str
    python: str
    spark: str
    torch: str
    cuda: str
    nccl: str
    deepspeed: str
    transformers: str
    accelerate: str
    flash_attn: str
    flash_attn_torch: str
    supported_until: str
    source: str
    date: str

    @property
    def has_distributor(self) -> bool:
        """``DeepspeedTorchDistributor`` came with Spark 3.5, DeepSpeed itself with runtime 14."""
        return bool(self.deepspeed)


@cache
def runtimes() -> tuple[Runtime, ...]:
    """All that are known, the oldest first."""
    return tuple(Runtime(**row) for row in packaged("runtimes.csv"))


def runtime(spark_version: str) -> Runtime:
    """The runtime of this key. Raises :class:`SpecError` for one that is unknown or cannot train with DeepSpeed."""
    known: Mapping[str, Runtime] = {found.spark_version: found for found in runtimes() if found.has_distributor}
    if spark_version in known:
        return known[spark_version]
    near = difflib.get_close_matches(spark_version, known, n=1, cutoff=0.4)
    older = any(found.spark_version == spark_version for found in runtimes())
    problem = FieldProblem(
        field="spark_version",
        value=spark_version,
        problem="has no DeepSpeed" if older else "is no GPU runtime for machine learning that is known",
        suggestion=f"Use {near[0] if near else default_runtime().spark_version!r}.",
    )
    raise SpecError([problem])


def default_runtime(attention: Attention = Attention.SDPA) -> Runtime:
    """The newest with long-term support; for flash attention, with a flash-attn that was built for its torch."""
    return _newest(attention)[0]


def offered_runtime(asked: str, attention: Attention, offered: Collection[str]) -> tuple[Runtime, tuple[str, ...]]:
    """The runtime of a cluster in a workspace that has those of ``offered``, and warnings.

    ``asked``: its key; empty for the newest with long-term support, which steps back, with a warning, to the newest
    that the workspace has too. Raises :class:`SpecError` where it lacks what was asked for, or has none that suits.
    """
    suited = [found for found in _newest(attention) if found.spark_version in offered]
    if asked:
        if asked in offered:
            return runtime(asked), ()
        works = f"Use {suited[0].spark_version!r}, or leave it out." if suited else "Leave it out."
        raise SpecError([_not_offered(asked, "is not among the runtimes of this workspace", works)])
    if not suited:
        works = f"Known are {', '.join(found.spark_version for found in _newest(attention))}."
        raise SpecError([_not_offered(None, "this workspace has no runtime that is known to suit", works)])
    newest = default_runtime(attention)
    if suited[0] == newest:
        return newest, ()
    used = suited[0].spark_version
    return suited[0], (f"This workspace does not have runtime {newest.spark_version}: {used} is used instead.",)


def _newest(attention: Attention) -> list[Runtime]:
    """Those with long-term support, the newest first."""
    return [
        found
        for found in reversed(runtimes())
        if found.supported_until
        and found.has_distributor
        and (attention is not Attention.FLASH or not found.flash_attn_torch)
    ]


def _not_offered(asked: str | None, problem: str, suggestion: str) -> FieldProblem:
    return FieldProblem(field="spark_version", value=asked, problem=problem, suggestion=suggestion)
