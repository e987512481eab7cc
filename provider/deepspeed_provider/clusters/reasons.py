# SPDX-License-Identifier: Apache-2.0
"""Why the other node types are not in the table: each one's own best, whatever the rows shown.

Counted when it is read: a search that only wants the table does not pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from deepspeed_provider.clusters.candidate import Candidate
from deepspeed_provider.clusters.job import Constraints, Objective
from deepspeed_provider.clusters.needs import Shortage
from deepspeed_provider.clusters.node_type import NodeType
from deepspeed_provider.clusters.ways import Bound, Ways


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A node type that is not in the table, and why.

    Attributes:
        best: how it runs the job best, or comes closest to the limits; None where nothing fits.
        shortage: how it comes closest to holding the job, where nothing fits.
        distance: in dollars, hours, bytes or times a limit; comparable where the reasons are alike.
    """

    node_type: NodeType
    reason: str
    distance: float = 0.0
    best: Candidate | None = None
    shortage: Shortage | None = None


@dataclass(frozen=True, kw_only=True)
class Miss(Shortage):
    """How a node type comes closest to holding a job that it cannot hold."""

    node_type: NodeType


@dataclass(frozen=True, kw_only=True)
class OverLimits:
    """What fits, and comes closest to the limits that it does not keep."""

    candidate: Candidate
    constraints: Constraints

    @property
    def node_type(self) -> NodeType:
        return self.candidate.node_type

    @property
    def broken(self) -> list[str]:
        """Limits that it does not keep, in words."""
        return self.candidate.broken_limits(self.constraints)

    @property
    def excess(self) -> float:
        return self.candidate.excess(self.constraints)

    def __str__(self) -> str:
        return f"{'; '.join(self.broken)} at best ({_settings(self.candidate)})"


class Reasons:
    """``refused``: why each node type may not be tried; None for those that were."""

    def __init__(self, ways: Ways, refused: Mapping[NodeType, str | None], shown: frozenset[NodeType]) -> None:
        self._ways, self._refused, self._shown = ways, refused, shown

    @cached_property
    def rejections(self) -> tuple[Rejection, ...]:
        """Of every node type that is not shown."""
        return tuple(
            self._rejection(node_type, self._own[node_type])
            if reason is None
            else Rejection(node_type=node_type, reason=reason)
            for node_type, reason in self._refused.items()
            if node_type not in self._shown
        )

    @cached_property
    def nearest_miss(self) -> Miss | OverLimits | None:
        """Of an empty table: what fits and comes closest to the limits, else what misses the least memory."""
        if self._shown:
            return None
        over = [found for found in self._own.values() if isinstance(found, OverLimits)]
        if over:
            return min(over, key=self._distance)
        misses = [found for found in self._own.values() if isinstance(found, Miss)]
        return min(misses, key=_closeness, default=None)

    @cached_property
    def _own(self) -> dict[NodeType, Candidate | OverLimits | Miss]:
        """What each node type that was tried and is not shown comes to by itself."""
        return {
            node_type: self._own_best(node_type)
            for node_type, reason in self._refused.items()
            if reason is None and node_type not in self._shown
        }

    def _own_best(self, node_type: NodeType) -> Candidate | OverLimits | Miss:
        bounds, best = self._ways.bounds([node_type]), None
        for bound in bounds:
            found = self._ways.best(bound, best)
            if found is not None and (best is None or self._ways.rank(found) < self._ways.rank(best)):
                best = found
        return best or self._over_limits(bounds) or self._miss(node_type, bounds)

    def _over_limits(self, bounds: list[Bound]) -> OverLimits | None:
        """Of what fits; on one number of nodes the fastest comes closest to each limit."""
        if not self._ways.constraints.limited:
            return None
        free = self._ways.without_limits()
        found = [
            OverLimits(candidate=fastest, constraints=self._ways.constraints)
            for bound in bounds
            if (fastest := free.best(bound)) is not None
        ]
        return min(found, key=self._distance, default=None)

    def _miss(self, node_type: NodeType, bounds: list[Bound]) -> Miss:
        found = [shortage for bound in bounds if (shortage := self._ways.shortage(bound)) is not None]
        return Miss(node_type=node_type, **vars(min(found, key=lambda one: (one.missing_bytes, one.nodes))))

    def _distance(self, found: OverLimits) -> tuple[object, ...]:
        return found.excess, *self._ways.rank(found.candidate)

    def _rejection(self, node_type: NodeType, own: Candidate | OverLimits | Miss) -> Rejection:
        if isinstance(own, Miss):
            return Rejection(node_type=node_type, reason=str(own), distance=own.missing_bytes, shortage=own)
        if isinstance(own, OverLimits):
            return Rejection(node_type=node_type, reason=str(own), distance=own.excess, best=own.candidate)
        distance = own.goal(self._ways.objective)
        return Rejection(node_type=node_type, reason=self._worse(own), distance=distance, best=own)

    def _worse(self, found: Candidate) -> str:
        price, hours, settings = f"${found.usd:,.2f}", f"{found.hours:,.1f} h", _settings(found)
        if self._ways.objective is Objective.COST:
            return f"at best {price} in {hours} ({settings}), not cheaper than the rows shown"
        return f"at best {hours} for {price} ({settings}), not faster than the rows shown"


def _settings(found: Candidate) -> str:
    nodes = f"{found.nodes} node{'s' if found.nodes > 1 else ''}"
    return f"{nodes}, {found.layout}, micro-batch {found.options.micro_batch_size}"


def _closeness(miss: Miss) -> tuple[object, ...]:
    kind = miss.node_type
    return miss.missing_bytes, miss.nodes, kind.cloud.value, kind.node_type_id, kind.region
