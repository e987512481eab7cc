# SPDX-License-Identifier: Apache-2.0
"""What would make a job fit that fits nowhere: one change at a time, each tried by a search of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from deepspeed_provider.clusters.candidate import Candidate
from deepspeed_provider.clusters.job import Constraints, Job, Objective
from deepspeed_provider.clusters.node_type import NodeType
from deepspeed_provider.clusters.refusals import refusal
from deepspeed_provider.clusters.search import search
from deepspeed_provider.clusters.ways import Ways
from deepspeed_provider.sizing.options import Attention


def what_would_fit(job: Job, node_types: Sequence[NodeType], constraints: Constraints) -> tuple[str, ...]:
    """Changes of a job that fits nowhere, each by itself, after which something fits."""
    changes = {**_of_places(job, constraints), **_of_jobs(job, constraints)}
    found = {text: search(changed, node_types, limits, top=1).best for text, (changed, limits) in changes.items()}
    return tuple(
        f"{text} ({_outcome(best, constraints)})"
        for text, best in (*_raised(job, node_types, constraints), *found.items())
        if best is not None
    )


def _outcome(best: Candidate, constraints: Constraints) -> str:
    kind = best.node_type
    where = f" on {kind.cloud}" if constraints.clouds and kind.cloud not in constraints.clouds else ""
    elsewhere = f" in {kind.region}" if constraints.regions and kind.region not in constraints.regions else ""
    return f"{kind.node_type_id} x {best.nodes}{where}{elsewhere}: ${best.usd:,.2f}, {best.hours:,.1f} h"


def _of_places(job: Job, constraints: Constraints) -> dict[str, tuple[Job, Constraints]]:
    """Other machines, and more of them."""
    anywhere = replace(constraints, clouds=frozenset(), regions=frozenset())
    anything = replace(constraints, node_type_ids=frozenset(), families=())
    most = 2 * constraints.max_nodes
    changes = {f"up to {most} nodes": (job, replace(constraints, max_nodes=most))}
    if constraints.spot:
        changes["on demand instead of spot"] = job, replace(constraints, spot=False)
    if constraints.clouds or constraints.regions:
        changes[f"another {'cloud' if constraints.clouds else 'region'}"] = job, anywhere
    if constraints.node_type_ids or constraints.families:
        changes["other node types"] = job, anything
    if constraints.min_compute_capability is not None:
        changes["GPUs of any generation"] = job, replace(constraints, min_compute_capability=None)
    return changes


def _of_jobs(job: Job, constraints: Constraints) -> dict[str, tuple[Job, Constraints]]:
    """Lighter ones."""
    short = job.options.model_copy(update={"sequence_length": max(1, job.options.sequence_length // 2)})
    batch = 1 << (job.effective_batch_size - 1).bit_length()
    order = ["full", "lora", "qlora"]
    changed = {
        f"a sequence length of {short.sequence_length:,}": replace(job, options=short),
        f"an effective batch size of {batch}": replace(job, effective_batch_size=batch),
    }
    if job.options.attention is Attention.FLASH:
        plain = job.options.model_copy(update={"attention": Attention.SDPA})
        changed["sdpa attention"] = replace(job, options=plain)
    for name in order[order.index(job.options.method.value) + 1 :]:
        options = type(job.options)(**{**job.options.model_dump(), "method": name})
        changed[f"method {name}"] = replace(job, options=options)
    return {text: (other, constraints) for text, other in changed.items()}


def _raised(job: Job, node_types: Sequence[NodeType], constraints: Constraints) -> list[tuple[str, Candidate | None]]:
    """Each limit on price and time as high as it would have to be with the others kept; else all that must give."""
    found: list[tuple[str, Candidate | None]] = []
    if constraints.budget_usd is not None:
        best = search(job, node_types, replace(constraints, budget_usd=None), Objective.COST, 1).best
        found += _limit(best, constraints)
    if constraints.deadline_hours is not None:
        best = search(job, node_types, replace(constraints, deadline_hours=None), Objective.TIME, 1).best
        found += _limit(best, constraints)
    if constraints.max_usd_per_hour is not None:
        found += _limit(_cheapest_hour(job, node_types, constraints), constraints)
    if found or not constraints.limited:
        return found
    return _limit(search(job, node_types, constraints.without_limits(), Objective.COST, 1).best, constraints)


def _limit(best: Candidate | None, constraints: Constraints) -> list[tuple[str, Candidate | None]]:
    """The limits that this one needs, rounded up."""
    if best is None:
        return []
    needed = []
    if constraints.budget_usd is not None and best.usd > constraints.budget_usd:
        needed.append(f"a budget of ${math.ceil(100 * best.usd) / 100:,.2f}")
    if constraints.max_usd_per_hour is not None and best.usd_per_hour > constraints.max_usd_per_hour:
        needed.append(f"a limit of ${math.ceil(100 * best.usd_per_hour) / 100:,.2f} an hour")
    if constraints.deadline_hours is not None and best.hours > constraints.deadline_hours:
        needed.append(f"a deadline of {math.ceil(100 * best.hours) / 100:,.2f} h")
    return [(" and ".join(needed), best)]


def _cheapest_hour(job: Job, node_types: Iterable[NodeType], constraints: Constraints) -> Candidate | None:
    """What fits at the lowest price of an hour."""
    free = replace(constraints, max_usd_per_hour=None)
    ways = Ways(job, free, Objective.COST)
    tried = [node_type for node_type in node_types if refusal(job, node_type, free) is None]
    by_hour = sorted(ways.bounds(tried), key=lambda bound: bound.usd_per_hour)
    return next((found for bound in by_hour if (found := ways.best(bound)) is not None), None)
