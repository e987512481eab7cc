# SPDX-License-Identifier: Apache-2.0
"""Parts of a plan in words, as the terminal and a DAG's Markdown show them."""

from __future__ import annotations

import re
from typing import Final

from deepspeed_provider.clusters.candidate import Candidate
from deepspeed_provider.clusters.gpu_plan import GpuPlan, Refused
from deepspeed_provider.sizing.options import Method, Offload

# Types named in one line of refusals.
MOST_NAMES: Final = 3
_NUMBER: Final = re.compile(r"[\d.,]*\d")


def job_line(plan: GpuPlan) -> str:
    """What is trained, and how long."""
    job, options = plan.job, plan.job.options
    adapters = "" if options.method is Method.FULL else f" of rank {options.lora_rank}"
    return (
        f"{options.method}{adapters}, {job.tokens:,} tokens in {job.steps:,} steps of "
        f"{job.effective_batch_size} x {options.sequence_length:,}"
    )


def machines_text(found: Candidate) -> str:
    """Node type and how many; the driver of several is paid too."""
    times = f"{found.nodes}+{found.drivers} x " if found.nodes > 1 else ""
    return f"{times}{found.node_type.node_type_id}"


def settings_text(found: Candidate) -> str:
    """How a candidate trains; the last numbers are micro-batch and accumulation."""
    options = found.options
    moved = "" if options.offload is Offload.NONE else f", {options.offload} on {options.offload_device}"
    recomputed = ", checkpointing" if options.gradient_checkpointing else ""
    batch = f"{options.micro_batch_size} x {options.gradient_accumulation_steps}"
    return f"{options.precision}, ZeRO {options.zero_stage}{moved}{recomputed}, micro-batch {batch}"


def miss_lines(plan: GpuPlan) -> list[str]:
    """Of a plan that found nothing: what came closest, and what would make it fit."""
    lines = []
    miss = plan.choice.nearest_miss
    if miss is not None:
        lines.append(f"Nearest: {miss.node_type.node_type_id}, {miss}.")
    if plan.would_fit:
        lines.append(f"It would fit with {', or with '.join(plan.would_fit)}.")
    else:
        lines.append("Neither twice the nodes, nor half the sequence, nor a lighter method makes it fit.")
    return lines


def grouped(plan: GpuPlan) -> list[tuple[str, str]]:
    """(names, reason): refused types with one reason together, other clouds' last; where reasons differ in numbers
    only, the first one stands for all."""
    groups: dict[str, list[Refused]] = {}
    for one in _near_first(plan):
        groups.setdefault(_NUMBER.sub("#", one.reason), []).append(one)
    return [(_names(group), group[0].reason) for group in groups.values()]


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
