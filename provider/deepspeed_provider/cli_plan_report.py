# SPDX-License-Identifier: Apache-2.0
"""A plan for a person: the table it was chosen from, what it fills, and why not the others."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from rich import box
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deepspeed_provider.cli_plan_request import Planned
from deepspeed_provider.cli_report import BAR_WIDTH, GIB, print_list
from deepspeed_provider.clusters.candidate import Candidate
from deepspeed_provider.clusters.gpu_plan import GpuPlan, Refused
from deepspeed_provider.clusters.job import Objective
from deepspeed_provider.sizing.options import Method, Offload

# Lines of reasons, and types named in one of them, unless all are asked for.
MOST_REASONS: Final = 12
MOST_NAMES: Final = 3
# Columns of a terminal that takes all of a row.
WIDE: Final = 120
_NUMBER: Final = re.compile(r"[\d.,]*\d")


def print_plan(console: Console, found: Planned, *, show_all: bool) -> None:
    """Everything that ``--json`` has but the configuration and the cluster, which are for programs."""
    plan = found.plan
    console.print(Text(found.model, style="bold"))
    console.print(Text(_job(plan)))
    if plan.choice.best is not None:
        console.print(_candidates(plan, console.width))
        console.print(Text(_chosen(plan.choice.best), style="bold"))
        console.print(_memory(plan.choice.best))
    else:
        _print_miss(console, plan)
    _print_refused(console, plan, show_all=show_all)
    print_list(console, "Assumptions", found.assumptions, "")
    print_list(console, "Warnings", plan.warnings, "yellow")


def _job(plan: GpuPlan) -> str:
    job, options = plan.job, plan.job.options
    adapters = "" if options.method is Method.FULL else f" of rank {options.lora_rank}"
    return (
        f"{options.method}{adapters}, {job.tokens:,} tokens in {job.steps:,} steps of "
        f"{job.effective_batch_size} x {options.sequence_length:,}"
    )


def _candidates(plan: GpuPlan, width: int) -> Table:
    """In a narrow terminal the settings stand below the node type, and what the chosen one fills says the rest."""
    first = "cheapest" if plan.objective is Objective.COST else "fastest"
    kind = "spot" if plan.constraints.spot else "on demand"
    table = _bare_table(f"Candidates, {first} first, {kind}")
    wide = width >= WIDE
    table.add_column("")
    table.add_column("Node type", no_wrap=wide)
    table.add_column("GPUs")
    for name in ("$/hour", "Hours", "$ run", *(("GiB each", "Tokens/s", "Settings") if wide else ())):
        table.add_column(name, justify="left" if name == "Settings" else "right", no_wrap=name != "Settings")
    for number, candidate in enumerate(plan.choice.candidates):
        row = _row(candidate, wide=wide)
        table.add_row(">" if number == 0 else "", *row, style="bold" if number == 0 else "")
    return table


def _row(found: Candidate, *, wide: bool) -> list[str | Text]:
    node_type = found.node_type
    # The driver is paid too.
    times = f"{found.nodes}+{found.drivers} x " if found.nodes > 1 else ""
    row: list[str | Text] = [
        Text(f"{times}{node_type.node_type_id}" + ("" if wide else f"\n{_settings(found)}")),
        Text(f"{found.nodes * node_type.gpus} {node_type.gpu.name}"),
        f"{found.usd_per_hour:,.2f}",
        f"{found.hours:,.1f}",
        f"{found.usd:,.2f}",
    ]
    if wide:
        row += [
            f"{_gib(found.memory.gpu.total_bytes)}/{_gib(node_type.gpu.memory_bytes)}",
            f"{found.throughput.tokens_per_second:,.0f}",
            Text(_settings(found)),
        ]
    return row


def _bare_table(title: str) -> Table:
    return Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _settings(found: Candidate) -> str:
    options = found.options
    moved = "" if options.offload is Offload.NONE else f", {options.offload} on {options.offload_device}"
    recomputed = ", checkpointing" if options.gradient_checkpointing else ""
    batch = f"{options.micro_batch_size} x {options.gradient_accumulation_steps}"
    return f"{options.precision}, ZeRO {options.zero_stage}{moved}{recomputed}, micro-batch {batch}"


def _chosen(found: Candidate) -> str:
    speed, node_type = found.throughput, found.node_type
    return (
        f"Chosen: {node_type.node_type_id}, {speed.tokens_per_second:,.0f} tokens/s "
        f"({speed.mfu:.0%} of the peak, bound by {speed.bound_by}). It fills"
    )


def _memory(found: Candidate) -> Table:
    memory, node_type = found.memory, found.node_type
    table = _bare_table("")
    table.add_column("Memory")
    table.add_column("GiB", justify="right")
    table.add_column("of", justify="right")
    table.add_column("")
    for name, used, capacity in (
        ("each GPU", memory.gpu.total_bytes, node_type.gpu.memory_bytes),
        ("each host", memory.host.total_bytes, node_type.ram_bytes),
        ("NVMe of each host", memory.nvme.total_bytes, node_type.nvme_bytes),
    ):
        if used:
            bar = ProgressBar(total=max(capacity, 1), completed=used, width=BAR_WIDTH)
            table.add_row(name, _gib(used), _gib(capacity), bar)
    return table


def _print_miss(console: Console, plan: GpuPlan) -> None:
    console.print(Text("\nNothing fits.", style="bold red"))
    miss = plan.choice.nearest_miss
    if miss is not None:
        name = "The given hardware" if miss.node_type is None else miss.node_type.node_type_id
        console.print(Text(f"Nearest: {name}, {miss}."))
    if plan.would_fit:
        console.print(Text(f"It would fit with {', or with '.join(plan.would_fit)}."))
    else:
        console.print(Text("Neither twice the nodes, nor half the sequence, nor a lighter method makes it fit."))


def _print_refused(console: Console, plan: GpuPlan, *, show_all: bool) -> None:
    lines = [(one.node_type_id, one.reason) for one in plan.refused] if show_all else _grouped(_near_first(plan))
    if not lines:
        return
    console.print(Text(f"\nNot chosen: {len(plan.refused)} node types", style="bold"))
    shown = lines if show_all else lines[:MOST_REASONS]
    for names, reason in shown:
        console.print(Text.assemble("- ", (names, "bold"), f": {reason}"))
    if len(shown) < len(lines):
        console.print(Text(f"- and {len(lines) - len(shown)} reasons more", style="dim"))
    if not show_all:
        console.print(Text("--all shows each type with its own reason.", style="dim"))


def _near_first(plan: GpuPlan) -> list[Refused]:
    """Other clouds' types last."""
    clouds = plan.constraints.clouds
    return sorted(plan.refused, key=lambda one: bool(clouds) and one.cloud not in clouds)


def _grouped(refused: Iterable[Refused]) -> list[tuple[str, str]]:
    """Types with one reason together; where reasons differ in numbers only, the first one stands for all."""
    groups: dict[str, list[Refused]] = {}
    for one in refused:
        groups.setdefault(_NUMBER.sub("#", one.reason), []).append(one)
    return [(_names(group), group[0].reason) for group in groups.values()]


def _names(group: list[Refused]) -> str:
    named = [one.node_type_id for one in group[:MOST_NAMES]]
    more = len(group) - len(named)
    if len({one.reason for one in group}) > 1:
        return f"{named[0]} (and {len(group) - 1} more likewise)"
    return ", ".join(named) + (f" and {more} more" if more else "")


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"
