# SPDX-License-Identifier: Apache-2.0
"""Parts of a plan in words, as the terminal and a DAG's Markdown show them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from deepspeed_provider.clusters.candidate import Candidate, Setup, above_text, limit_text
from deepspeed_provider.clusters.given import Fitted
from deepspeed_provider.clusters.gpu_plan import GpuPlan, Refused
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Job
from deepspeed_provider.clusters.reasons import OverLimits
from deepspeed_provider.clusters.throughput import Throughput
from deepspeed_provider.sizing.options import Method, Offload

# Types named in one line of refusals.
MOST_NAMES: Final = 3
_DETAILS: Final = re.compile(r" \([^)]*\)|[\d.,]*\d")


def job_line(job: Job) -> str:
    """What is trained, and how long."""
    options = job.options
    adapters = "" if options.method is Method.FULL else f" of rank {options.lora_rank}"
    return (
        f"{options.method}{adapters}, {job.tokens:,} tokens in {job.steps:,} step{'' if job.steps == 1 else 's'} of "
        f"{job.effective_batch_size} x {options.sequence_length:,}"
    )


def machines_text(found: Candidate, *, with_region: bool = False) -> str:
    """Node type and how many; the driver of several is paid too."""
    times = f"{found.nodes}+{found.drivers} x " if found.nodes > 1 else ""
    where = f" in {found.node_type.region}" if with_region else ""
    return f"{times}{found.node_type.node_type_id}{where}"


def has_several_regions(found: Iterable[Candidate]) -> bool:
    """Of one cloud."""
    places = {(one.node_type.cloud, one.node_type.region) for one in found}
    return len(places) > len({cloud for cloud, _ in places})


def settings_text(found: Setup) -> str:
    """How it trains; the last numbers are micro-batch and accumulation."""
    options = found.options
    moved = "" if options.offload is Offload.NONE else f", {options.offload} on {options.offload_device}"
    recomputed = ", checkpointing" if options.gradient_checkpointing else ""
    batch = f"{options.micro_batch_size} x {options.gradient_accumulation_steps}"
    return f"{options.precision}, ZeRO {options.zero_stage}{moved}{recomputed}, micro-batch {batch}"


def given_text(hardware: Hardware) -> str:
    """Machines that are there."""
    return f"{hardware.nodes} x {hardware.gpus_per_node} {hardware.gpu.name}"


def speed_text(found: Throughput) -> str:
    return f"{found.tokens_per_second:,.0f} tokens/s ({found.mfu:.0%} of the peak, bound by {found.bound_by})"


def memory_rows(found: Setup) -> list[tuple[str, int, int]]:
    """(what, bytes that are used, bytes that are there) of all that is used."""
    memory, hardware = found.memory, found.hardware
    rows = [
        ("each GPU", memory.gpu.total_bytes, hardware.gpu.memory_bytes),
        ("each host", memory.host.total_bytes, hardware.ram_bytes_per_node),
        ("NVMe of each host", memory.nvme.total_bytes, hardware.nvme_bytes_per_node),
    ]
    return [row for row in rows if row[1]]


def time_and_price(found: Fitted) -> str:
    """Of the whole run."""
    hours = f"{found.hours:,.1f} h"
    return hours if found.usd is None else f"{hours}, ${found.usd:,.2f} at ${found.usd_per_hour:,.2f} an hour"


def miss_lines(plan: GpuPlan) -> list[str]:
    """Of a plan that found nothing: what came closest, and what would make it fit."""
    lines = []
    miss = plan.choice.nearest_miss
    if isinstance(miss, OverLimits):
        lines.append(f"Nearest: {_over_limits(miss)}.")
    elif miss is not None:
        lines.append(f"Nearest: {miss.node_type.node_type_id}, {miss}.")
    if plan.would_fit:
        lines.append(f"It would fit with {', or with '.join(plan.would_fit)}.")
    else:
        lines.append("No single change of machines, limits, sequence length, batch or method makes it fit.")
    return lines


def _over_limits(found: OverLimits) -> str:
    """Of one limit that is known to be the least; of several, which of them are broken."""
    best, limits = found.candidate, found.constraints
    machines = machines_text(best)
    match (limits.budget_usd, limits.max_usd_per_hour, limits.deadline_hours):
        case (float() | int() as most, None, None):
            price = above_text(best.usd, most, 2)
            return f"{machines} at ${price} is the cheapest that fits; the budget is ${limit_text(most, 2)}"
        case (None, float() | int() as most, None):
            price, limit = above_text(best.usd_per_hour, most, 2), limit_text(most, 2)
            return f"{machines} at ${price} an hour is the cheapest hour that fits; the limit is ${limit}"
        case (None, None, float() | int() as most):
            hours = above_text(best.hours, most, 1)
            return f"{machines} with {hours} h is the fastest that fits; the deadline is {limit_text(most, 1)} h"
    return f"{machines} comes closest to the limits: {'; '.join(found.broken)}"


def grouped(plan: GpuPlan) -> list[tuple[str, str]]:
    """(names, reason): refused types with one reason together, other clouds' last; where reasons differ in numbers
    and settings only, the one that came closest stands for all."""
    groups: dict[str, list[Refused]] = {}
    for one in _near_first(plan):
        groups.setdefault(_DETAILS.sub("#", one.reason), []).append(one)
    closest_first = [sorted(group, key=lambda one: one.distance) for group in groups.values()]
    return [(_names(group), group[0].reason) for group in closest_first]


def _near_first(plan: GpuPlan) -> list[Refused]:
    """Other clouds' types last."""
    clouds = plan.constraints.clouds
    return sorted(plan.refused, key=lambda one: bool(clouds) and one.cloud not in clouds)


def _names(group: list[Refused]) -> str:
    named = [one.node_type_id for one in group[:MOST_NAMES]]
    more = len(group) - len(named)
    if len({one.reason for one in group}) > 1:
        return f"{named[0]} (and {len(group) - 1} more likewise)"
    return ", ".join(named) + (f" and {more} more" if more else "")
