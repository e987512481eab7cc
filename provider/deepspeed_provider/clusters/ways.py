# SPDX-License-Identifier: Apache-2.0
"""The best settings on so many nodes of a type.

There the price of an hour is fixed, so the fastest settings that fit are also the cheapest. For one layout of model
states speed grows with the micro-batch, so the largest that fits is the fastest. What is left is a bound: no settings
are faster than their computation alone. The tests hold the result against a search that knows none of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from deepspeed_provider.clusters.candidate import Candidate, Priced, Room, candidate
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Constraints, Job, Objective
from deepspeed_provider.clusters.needs import Needs, Shortage, fitting, nearest
from deepspeed_provider.clusters.node_type import NodeType
from deepspeed_provider.clusters.pace import Pace
from deepspeed_provider.clusters.settings import node_counts


@dataclass(frozen=True, kw_only=True)
class Bound(Priced):
    """What no settings on so many nodes of a type can beat."""

    least_seconds_per_step: float

    @property
    def seconds_per_step(self) -> float:
        return self.slowdown * self.least_seconds_per_step


class Ways:
    """Of one job under some limits; what is counted once serves all machines.

    Raises :class:`SpecError` for LoRA targets that the model does not have.
    """

    def __init__(
        self,
        job: Job,
        constraints: Constraints,
        objective: Objective,
        *,
        counted: tuple[Needs, Pace] | None = None,
    ) -> None:
        self.job, self.constraints, self.objective = job, constraints, objective
        self._needs, self._pace = counted or (Needs(job), Pace(job))

    def without_limits(self) -> Ways:
        """On price and time."""
        free = self.constraints.without_limits()
        return Ways(self.job, free, self.objective, counted=(self._needs, self._pace))

    def bounds(self, node_types: Iterable[NodeType]) -> list[Bound]:
        """For each node type and number of nodes, best first."""
        limits = self.constraints
        found = [
            self._bound(node_type, nodes)
            for node_type in node_types
            for nodes in node_counts(
                self.job, node_type.gpus, least=limits.min_nodes, most=node_type.most_nodes(limits.max_nodes)
            )
        ]
        return sorted(found, key=self._order)

    def best(self, bound: Bound, last: Priced | None = None) -> Candidate | None:
        """The best settings that fit and keep the limits, if they are not worse than ``last``."""
        if bound.broken_limits(self.constraints) or self._above(bound, last):
            return None
        room = Room.of(bound.hardware, self.constraints.headroom)
        best: Candidate | None = None
        for layout, size in fitting(self._needs, bound.hardware, room):
            seconds = self._pace.least_seconds_of(layout, size, bound.hardware)
            least = replace(bound, least_seconds_per_step=seconds)
            if self._above(least, last) or self._above(least, best):
                continue
            found = candidate(self.job, bound.node_type, bound.nodes, layout, size, spot=bound.spot, pace=self._pace)
            if found.broken_limits(self.constraints):
                continue
            if best is None or self.rank(found) < self.rank(best):
                best = found
        return best

    def shortage(self, bound: Bound) -> Shortage | None:
        """What is missing at best on these nodes; None where some settings fit."""
        room = Room.of(bound.hardware, self.constraints.headroom)
        return nearest(self._needs, bound.hardware, room)

    def rank(self, found: Candidate) -> tuple[object, ...]:
        return found.rank(self.objective)

    def _above(self, found: Priced, other: Priced | None) -> bool:
        return other is not None and found.goal(self.objective) > other.goal(self.objective)

    def _bound(self, node_type: NodeType, nodes: int) -> Bound:
        hardware = Hardware.of(node_type, nodes)
        return Bound(
            hardware=hardware,
            node_type=node_type,
            spot=self.constraints.spot,
            steps=self.job.steps,
            least_seconds_per_step=self._pace.least_seconds(hardware),
        )

    def _order(self, bound: Bound) -> tuple[object, ...]:
        kind = bound.node_type
        return bound.goal(self.objective), bound.nodes, kind.cloud.value, kind.node_type_id, kind.region
