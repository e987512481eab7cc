# SPDX-License-Identifier: Apache-2.0
"""The best machines and settings for a job, and why not the others.

On a given number of nodes of one type the price of an hour is fixed, so the fastest settings that fit are also
the cheapest. For one layout of model states speed grows with the micro-batch, so the largest that fits is the
fastest. What is left is a bound: no settings are faster than their computation alone. The tests hold the result
against a search that knows none of this.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deepspeed_provider.clusters.candidate import Candidate, Priced, Room, candidate
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Constraints, Job, Objective
from deepspeed_provider.clusters.needs import Needs, Shortage, fitting, nearest
from deepspeed_provider.clusters.node_type import NodeType
from deepspeed_provider.clusters.pace import Pace
from deepspeed_provider.clusters.refusals import refusal
from deepspeed_provider.clusters.settings import node_counts
from deepspeed_provider.clusters.statements import assumptions, warnings


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A node type that is not in the table, and why."""

    node_type: NodeType
    reason: str


@dataclass(frozen=True, kw_only=True)
class Miss(Shortage):
    """How a node type comes closest to holding a job that it cannot hold."""

    node_type: NodeType


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The table: candidates from the best down, everything else with its reason, the nearest miss.

    Attributes:
        nearest_miss: where the table is empty.
        assumptions: what prices and times are made of, and how much memory is left free.
        warnings: which numbers of the rows shown are assumed, and what makes them doubtful.
    """

    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    nearest_miss: Miss | None
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None


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
    return _Search(job, constraints or Constraints(), objective, top).choose(tuple(dict.fromkeys(node_types)))


@dataclass(frozen=True, kw_only=True)
class _Bound(Priced):
    """What no settings on so many nodes of a type can beat."""

    least_seconds_per_step: float

    @property
    def seconds_per_step(self) -> float:
        return self.least_seconds_per_step


class _Search:
    def __init__(self, job: Job, constraints: Constraints, objective: Objective, top: int) -> None:
        self.job, self.constraints, self.objective, self.top = job, constraints, objective, top
        self.needs, self.pace = Needs(job), Pace(job)
        self.table: list[Candidate] = []
        # In words, or what is worse than the rows shown: these are known only at the end.
        self.reasons: dict[NodeType, str | Priced] = {}

    def choose(self, node_types: tuple[NodeType, ...]) -> Choice:
        refused = {node_type: refusal(self.job, node_type, self.constraints) for node_type in node_types}
        open_types = [node_type for node_type, reason in refused.items() if reason is None]
        for bound in self._bounds(open_types):
            self._try(bound)
        shown = {found.node_type for found in self.table}
        misses = [] if self.table else [self._miss(node_type) for node_type in open_types]
        rejections = [
            Rejection(node_type=node_type, reason=reason or self._reason(node_type))
            for node_type, reason in refused.items()
            if node_type not in shown
        ]
        return Choice(
            candidates=tuple(self.table),
            rejections=tuple(rejections),
            nearest_miss=min((miss for miss in misses if miss), key=_closeness, default=None),
            assumptions=assumptions(self.job, self.table, self.constraints),
            warnings=warnings(self.table),
        )

    def _bounds(self, node_types: Sequence[NodeType]) -> list[_Bound]:
        """For each node type and number of nodes, best first."""
        limits = self.constraints
        found = [
            self._bound(node_type, nodes)
            for node_type in node_types
            for nodes in node_counts(self.job, node_type.gpus, least=limits.min_nodes, most=limits.max_nodes)
        ]
        return sorted(found, key=self._order)

    def _bound(self, node_type: NodeType, nodes: int) -> _Bound:
        hardware = Hardware.of(node_type, nodes)
        return _Bound(
            hardware=hardware,
            node_type=node_type,
            spot=self.constraints.spot,
            steps=self.job.steps,
            least_seconds_per_step=self.pace.least_seconds(hardware),
        )

    def _order(self, bound: _Bound) -> tuple[object, ...]:
        kind = bound.node_type
        return bound.goal(self.objective), bound.nodes, kind.cloud.value, kind.node_type_id, kind.region

    def _try(self, bound: _Bound) -> None:
        """Puts the best that a bound leads to into the table, unless it cannot get there."""
        node_type = bound.node_type
        broken = bound.broken_limits(self.constraints)
        if broken:
            self.reasons.setdefault(node_type, f"{_nodes(bound.nodes)} at best: {broken[0]}")
            return
        if self._full() and self._above(bound, self.table[-1]):
            self.reasons.setdefault(node_type, bound)
            return
        best, reason = self._best(bound)
        if best is not None:
            self._show(best)
        elif reason is not None:
            self.reasons.setdefault(node_type, reason)

    def _best(self, bound: _Bound) -> tuple[Candidate | None, str | Priced | None]:
        """(the best settings that fit and keep the limits, why those that fit are none of it)."""
        room = Room.of(bound.hardware, self.constraints.headroom)
        best: Candidate | None = None
        reason: str | Priced | None = None
        for layout, size in fitting(self.needs, bound.hardware, room):
            least = replace(bound, least_seconds_per_step=self.pace.least_seconds_of(layout, size, bound.hardware))
            if self._full() and self._above(least, self.table[-1]):
                reason = reason or bound
            elif best is None or not self._above(least, best):
                found = candidate(self.job, bound.node_type, bound.nodes, layout, size, spot=bound.spot, pace=self.pace)
                broken = found.broken_limits(self.constraints)
                if broken:
                    reason = reason or f"{_nodes(bound.nodes)}: {broken[0]}"
                elif best is None or self._rank(found) < self._rank(best):
                    best = found
        return best, reason

    def _full(self) -> bool:
        return len(self.table) >= self.top

    def _above(self, found: Priced, other: Priced) -> bool:
        return found.goal(self.objective) > other.goal(self.objective)

    def _show(self, found: Candidate) -> None:
        insort(self.table, found, key=self._rank)
        for dropped in self.table[self.top :]:
            self.reasons.setdefault(dropped.node_type, dropped)
        del self.table[self.top :]

    def _rank(self, found: Candidate) -> tuple[object, ...]:
        return found.rank(self.objective)

    def _worse(self, found: Priced) -> str:
        """Than the last row shown."""
        last = self.table[self.top - 1]
        if self.objective is Objective.COST:
            return f"at best ${found.usd:,.2f}, more than the {self.top} rows shown (up to ${last.usd:,.2f})"
        return f"at best {found.hours:,.2f} h, slower than the {self.top} rows shown (up to {last.hours:,.2f} h)"

    def _reason(self, node_type: NodeType) -> str:
        reason = self.reasons.get(node_type)
        if reason is None:
            return str(self._miss(node_type))
        return reason if isinstance(reason, str) else self._worse(reason)

    def _miss(self, node_type: NodeType) -> Miss | None:
        """The closest of its numbers of nodes; None where one fits."""
        limits, found = self.constraints, []
        for nodes in node_counts(self.job, node_type.gpus, least=limits.min_nodes, most=limits.max_nodes):
            hardware = Hardware.of(node_type, nodes)
            shortage = nearest(self.needs, hardware, Room.of(hardware, limits.headroom))
            if shortage is None:
                return None
            found.append(shortage)
        return Miss(node_type=node_type, **vars(min(found, key=lambda one: one.missing_bytes)))


def _closeness(miss: Miss) -> tuple[object, ...]:
    kind = miss.node_type
    return miss.missing_bytes, miss.nodes, kind.cloud.value, kind.node_type_id, kind.region


def _nodes(number: int) -> str:
    return f"{number} node{'s' if number > 1 else ''}"


def what_would_fit(job: Job, node_types: Sequence[NodeType], constraints: Constraints) -> tuple[str, ...]:
    """Changes of a job that fits nowhere, each by itself, after which something fits."""
    short = job.options.model_copy(update={"sequence_length": max(1, job.options.sequence_length // 2)})
    batch = 1 << (job.effective_batch_size - 1).bit_length()
    free = replace(constraints, max_usd_per_hour=None, budget_usd=None, deadline_hours=None)
    changes = {
        f"up to {2 * constraints.max_nodes} nodes": (job, replace(constraints, max_nodes=2 * constraints.max_nodes)),
        f"a sequence length of {short.sequence_length:,}": (replace(job, options=short), constraints),
        f"an effective batch size of {batch}": (replace(job, effective_batch_size=batch), constraints),
        **_lighter_methods(job, constraints),
        "no limits on price and time": (job, free),
    }
    found = {text: search(changed, node_types, limits, top=1).best for text, (changed, limits) in changes.items()}
    return tuple(
        f"{text} ({best.node_type.node_type_id} x {best.nodes}: ${best.usd:,.2f}, {best.hours:,.1f} h)"
        for text, best in found.items()
        if best is not None
    )


def _lighter_methods(job: Job, constraints: Constraints) -> dict[str, tuple[Job, Constraints]]:
    order = ["full", "lora", "qlora"]
    lighter = order[order.index(job.options.method.value) + 1 :]
    return {
        f"method {name}": (
            replace(job, options=type(job.options)(**{**job.options.model_dump(), "method": name})),
            constraints,
        )
        for name in lighter
    }
