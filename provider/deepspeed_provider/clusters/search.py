# SPDX-License-Identifier: Apache-2.0
"""The best machines and settings for a job, and why not the others."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepspeed_provider.clusters.candidate import Candidate
from deepspeed_provider.clusters.job import Constraints, Job, Objective
from deepspeed_provider.clusters.node_type import NodeType
from deepspeed_provider.clusters.reasons import Miss, OverLimits, Reasons, Rejection
from deepspeed_provider.clusters.refusals import refusal
from deepspeed_provider.clusters.statements import assumptions, warnings
from deepspeed_provider.clusters.ways import Ways


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The table: candidates from the best down, everything else with its reason, the nearest miss.

    Attributes:
        assumptions: what prices and times are made of, and how much memory is left free.
        warnings: which numbers of the rows shown are assumed, and what makes them doubtful.
    """

    candidates: tuple[Candidate, ...]
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    reasons: Reasons = field(repr=False, compare=False)

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """Every node type that is not in the table; counted when it is first read."""
        return self.reasons.rejections

    @property
    def nearest_miss(self) -> Miss | OverLimits | None:
        """Where the table is empty."""
        return self.reasons.nearest_miss


def search(
    job: Job,
    node_types: Iterable[NodeType],
    constraints: Constraints | None = None,
    objective: Objective = Objective.COST,
    top: int = 10,
) -> Choice:
    """The ``top`` candidates, one for each node type and number of nodes. Deterministic, whatever the order of
    ``node_types``.

    Raises :class:`SpecError` for LoRA targets that the model does not have.
    """
    constraints = constraints or Constraints()
    ways = Ways(job, constraints, objective)
    refused = {node_type: refusal(job, node_type, constraints) for node_type in node_types}
    table = _table(ways, [node_type for node_type, reason in refused.items() if reason is None], top)
    return Choice(
        candidates=tuple(table),
        assumptions=assumptions(job, table, constraints),
        warnings=warnings(table),
        reasons=Reasons(ways, refused, frozenset(found.node_type for found in table)),
    )


def _table(ways: Ways, node_types: Iterable[NodeType], top: int) -> list[Candidate]:
    """Best first. Where the last row is better than a bound, nothing that the bound leads to is counted."""
    table: list[Candidate] = []
    for bound in ways.bounds(node_types):
        found = ways.best(bound, table[-1] if len(table) >= top else None)
        if found is not None:
            insort(table, found, key=ways.rank)
            del table[top:]
    return table
