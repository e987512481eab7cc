# SPDX-License-Identifier: Apache-2.0
"""The catalogue of node types: packaged, mended by a user's own rows, restricted to what a workspace has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from deepspeed_provider.clusters.node_type import Cloud, NodeType, Support, Tier
from deepspeed_provider.clusters.prices import packaged, usd_per_dbu
from deepspeed_provider.clusters.rows import overridden, parsed
from deepspeed_provider.clusters.workspace import WorkspaceTypes, restricted

__all__ = [
    "Cloud",
    "NodeType",
    "Support",
    "Tier",
    "WorkspaceTypes",
    "node_types",
    "restricted",
    "usd_per_dbu",
    "with_overrides",
]


@cache
def node_types(*, tier: Tier = Tier.PREMIUM) -> tuple[NodeType, ...]:
    """The packaged catalogue: AWS, Azure and GCP, each in one region."""
    return parsed(packaged("node_types.csv"), {cloud: usd_per_dbu(cloud, tier) for cloud in Cloud})


def with_overrides(found: Iterable[NodeType], rows: Iterable[Mapping[str, Any]]) -> tuple[NodeType, ...]:
    """The catalogue with a user's own rows: those named by ``cloud`` and ``node_type_id`` change, others are added.

    A row for another region is one more place for the same machine, and what it leaves out is as in the catalogue; one
    without a region is for all of them. Columns are those of the packaged ``node_types.csv``, and ``usd_per_dbu``; an
    empty one says nothing. Raises :class:`SpecError` with every problem of every row.
    """
    return overridden(tuple(found), rows)
