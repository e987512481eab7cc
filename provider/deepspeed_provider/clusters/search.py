# SPDX-License-Identifier: Apache-2.0
"""The best machines and settings for a job, and why not the others.

On a given number of nodes of one type the price of an hour is fixed, so the fastest settings that
fit are also the cheapest. For one layout of model states, memory and speed both grow with the
micro-batch, so the largest that fits is the fastest. What is left is a bound: no layout is faster
than the one with the least communication, without offload and recomputation, at the largest
micro-batch. The tests hold the result against a search that knows none of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deepspeed_provider.clusters.candidate import Candidate, NeedCache, candidate, need
from deepspeed_provider.clusters.job import Constraints, Job, Objective
from deepspeed_provider.clusters.node_type import NodeType
from deepspeed_provider.clusters.refusals import refusal
from deepspeed_provider.clusters.settings import (
    Layout,
    layouts,
    micro_batch_sizes,
    node_counts,
    options_for,
    sequences_per_gpu,
)

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A node type that is not in the table, and why."""

    node_type: NodeType
    reason: str


@dataclass(frozen=True, kw_only=True)
class Miss:
    """How a node type comes closest to holding a job that it cannot hold."""

    node_type: NodeType
    nodes: int
    layout: Layout
    resource: str
    missing_bytes: int

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        missing = f"{self.missing_bytes / GIB:.1f} GiB of {self.resource}"
        return f"{missing} too little at best ({nodes}, {self.layout}, micro-batch 1)"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The table: candidates from the best down, everything else with its reason, the nearest miss."""

    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    nearest_miss: Miss | None

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
    """The ``top`` candidates, one for each node type and number of nodes. Deterministic.

    Raises :class:`SpecError` for LoRA targets that the model does not have.
    """
    return _Search(job, constraints or Constraints(), objective, top).choose(tuple(node_types))


class _Search:
    def __init__(self, job: Job, constraints: Constraints, objective: Objective, top: int) -> None:
        self.job, self.constraints, self.objective, self.top = job, constraints, objective, top
        self.cache: NeedCache = {}
        self.table: list[Candidate] = []
        self.reasons: dict[NodeType, str] = {}
        self.misses: dict[NodeType, Miss] = {}

    def choose(self, node_types: tuple[NodeType, ...]) -> Choice:
        open_types = []
        for node_type in node_types:
            reason = refusal(self.job, node_type, self.constraints)
            if reason is None:
                open_types.append(node_type)
            else:
                self.reasons[node_type] = reason
        for bound in self._bounds(open_types):
            self._try(bound)
        shown = {found.node_type for found in self.table}
        rejections = [
            Rejection(node_type=node_type, reason=self._reason(node_type))
            for node_type in node_types
            if node_type not in shown
        ]
        return Choice(candidates=tuple(self.table), rejections=tuple(rejections), nearest_miss=self._nearest())

    def _bounds(self, node_types: Sequence[NodeType]) -> list[Candidate]:
        """For each node type and number of nodes, what it would be if memory were no object; best first."""
        limits = self.constraints
        found = [
            self._ideal(node_type, nodes, self._layouts(node_type, nodes)[0])
            for node_type in node_types
            for nodes in node_counts(self.job, node_type.gpus, least=limits.min_nodes, most=limits.max_nodes)
        ]
        return sorted(found, key=self._rank)

    def _try(self, bound: Candidate) -> None:
        """Puts the best that a bound leads to into the table, unless it cannot get there."""
        node_type = bound.node_type
        if self._full() and bound.goal(self.objective) > self.table[-1].goal(self.objective):
            self.reasons.setdefault(node_type, self._dearer(bound))
            return
        broken = bound.broken_limits(self.constraints)
        if broken:
            self.reasons.setdefault(node_type, f"at best {broken[0]}")
            return
        best = self._fastest(bound)
        if best is None:
            self._note_miss(node_type, bound.nodes)
            return
        broken = best.broken_limits(self.constraints)
        if broken:
            self.reasons[node_type] = broken[0]
            return
        self.table.append(best)
        self.table.sort(key=self._rank)
        for dropped in self.table[self.top :]:
            self.reasons[dropped.node_type] = self._dearer(dropped)
        del self.table[self.top :]

    def _fastest(self, bound: Candidate) -> Candidate | None:
        """The fastest settings that fit, layout by layout until no other can be faster."""
        best: Candidate | None = None
        node_type, nodes = bound.node_type, bound.nodes
        ideals = [self._ideal(node_type, nodes, layout) for layout in self._layouts(node_type, nodes)]
        for ideal in sorted(ideals, key=self._rank):
            if best is not None and ideal.goal(self.objective) > best.goal(self.objective):
                break
            found = self._largest_that_fits(ideal)
            if found is not None and (best is None or self._rank(found) < self._rank(best)):
                best = found
        return best

    def _largest_that_fits(self, ideal: Candidate) -> Candidate | None:
        sizes = self._micro_batch_sizes(ideal.node_type, ideal.nodes)
        low, high = 0, len(sizes)
        while low < high:
            middle = (low + high) // 2
            if self._shortfalls(ideal, sizes[middle]):
                high = middle
            else:
                low = middle + 1
        return self._candidate(ideal.node_type, ideal.nodes, ideal.layout, sizes[low - 1]) if low else None

    def _note_miss(self, node_type: NodeType, nodes: int) -> None:
        for layout in self._layouts(node_type, nodes):
            short = self._shortfalls(self._ideal(node_type, nodes, layout), 1)
            resource = max(short, key=lambda name: short[name])
            miss = Miss(
                node_type=node_type, nodes=nodes, layout=layout, resource=resource, missing_bytes=short[resource]
            )
            known = self.misses.get(node_type)
            if known is None or miss.missing_bytes < known.missing_bytes:
                self.misses[node_type] = miss

    # helpers of the above

    def _layouts(self, node_type: NodeType, nodes: int) -> tuple[Layout, ...]:
        alone = node_type.gpus * nodes == 1
        return layouts(self.job.options.method, alone=alone, has_nvme=node_type.nvme_bytes > 0)

    def _micro_batch_sizes(self, node_type: NodeType, nodes: int) -> tuple[int, ...]:
        return micro_batch_sizes(sequences_per_gpu(self.job, node_type.gpus * nodes) or 1)

    def _ideal(self, node_type: NodeType, nodes: int, layout: Layout) -> Candidate:
        return self._candidate(node_type, nodes, layout, self._micro_batch_sizes(node_type, nodes)[-1])

    def _candidate(self, node_type: NodeType, nodes: int, layout: Layout, micro_batch_size: int) -> Candidate:
        return candidate(
            self.job,
            node_type,
            nodes,
            layout,
            micro_batch_size,
            spot=self.constraints.spot,
        )

    def _shortfalls(self, ideal: Candidate, micro_batch_size: int) -> dict[str, int]:
        node_type = ideal.node_type
        options = options_for(
            self.job,
            ideal.layout,
            node_type.gpu,
            gpus_per_node=node_type.gpus,
            nodes=ideal.nodes,
            micro_batch_size=micro_batch_size,
        )
        return dict(need(self.job, options, self.cache).shortfalls(node_type, self.constraints.headroom))

    def _rank(self, found: Candidate) -> tuple[object, ...]:
        return found.rank(self.objective)

    def _full(self) -> bool:
        return len(self.table) >= self.top

    def _dearer(self, found: Candidate) -> str:
        last = self.table[min(self.top, len(self.table)) - 1]
        if self.objective is Objective.COST:
            return f"at best ${found.usd:,.2f}, more than the {self.top} rows shown (up to ${last.usd:,.2f})"
        return f"at best {found.hours:,.2f} h, slower than the {self.top} rows shown (up to {last.hours:,.2f} h)"

    def _reason(self, node_type: NodeType) -> str:
        miss = self.misses.get(node_type)
        return self.reasons.get(node_type) or (str(miss) if miss else "not tried")

    def _nearest(self) -> Miss | None:
        if self.table or not self.misses:
            return None
        return min(self.misses.values(), key=lambda miss: (miss.missing_bytes, miss.node_type.node_type_id))


def what_would_fit(job: Job, node_types: Sequence[NodeType], constraints: Constraints) -> tuple[str, ...]:
    """Changes of a job that fits nowhere, each by itself, after which something fits."""
    short = job.options.model_copy(update={"sequence_length": max(1, job.options.sequence_length // 2)})
    changes = {
        f"up to {2 * constraints.max_nodes} nodes": (job, replace(constraints, max_nodes=2 * constraints.max_nodes)),
        f"a sequence length of {short.sequence_length:,}": (replace(job, options=short), constraints),
        **_lighter_methods(job, constraints),
        "no limits on price and time": (
            job,
            replace(constraints, max_usd_per_hour=None, budget_usd=None, deadline_hours=None),
        ),
    }
    return tuple(
        text for text, (changed, limits) in changes.items() if search(changed, node_types, limits, top=1).candidates
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
