# SPDX-License-Identifier: Apache-2.0
"""A plan for a person: the table it was chosen from where there is one, what it fills, and why not the others."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deepspeed_provider.cli_report import BAR_WIDTH, GIB, print_list
from deepspeed_provider.clusters.candidate import Candidate, Setup
from deepspeed_provider.clusters.given import Fitted
from deepspeed_provider.clusters.gpu_plan import GpuPlan
from deepspeed_provider.clusters.job import Objective
from deepspeed_provider.plan_texts import (
    given_text,
    grouped,
    has_several_regions,
    job_line,
    machines_text,
    memory_rows,
    miss_lines,
    settings_text,
    speed_text,
    time_and_price,
)
from deepspeed_provider.requested.given import PlannedOnGiven
from deepspeed_provider.requested.plan import Planned

# Lines of reasons, unless all are asked for.
MOST_REASONS: Final = 12
# Columns of a terminal that takes all of a row.
WIDE: Final = 120


def print_plan(console: Console, found: Planned, *, show_all: bool) -> None:
    """Everything that ``--json`` has but the configuration and the cluster, which are for programs."""
    plan = found.plan
    console.print(Text(found.model, style="bold"))
    console.print(Text(job_line(plan.job)))
    if plan.choice.best is not None:
        console.print(_candidates(plan, console.width))
        console.print(Text(_chosen(plan.choice.best), style="bold"))
        console.print(_memory(plan.choice.best))
    else:
        _print_miss(console, plan)
    _print_refused(console, plan, show_all=show_all)
    print_list(console, "Assumptions", found.assumptions, "")
    print_list(console, "Warnings", plan.warnings, "yellow")


def print_on_given(console: Console, found: PlannedOnGiven) -> None:
    """Everything that ``--json`` has but the configuration, which is for programs."""
    plan, machines = found.plan, given_text(found.plan.hardware)
    console.print(Text(found.model, style="bold"))
    console.print(Text(job_line(plan.job)))
    if isinstance(plan.fitted, Fitted):
        console.print(Text(f"\nChosen for {machines}: {settings_text(plan.fitted)}", style="bold"))
        console.print(Text(f"{speed_text(plan.fitted.throughput)}, {time_and_price(plan.fitted)}. It fills"))
        console.print(_memory(plan.fitted))
    else:
        console.print(Text(f"\nNothing fits {machines}.", style="bold red"))
        console.print(Text(f"Nearest: {plan.fitted}."))
    print_list(console, "Assumptions", found.assumptions, "")
    print_list(console, "Warnings", plan.warnings, "yellow")


def _candidates(plan: GpuPlan, width: int) -> Table:
    """In a narrow terminal the settings stand below the node type, and what the chosen one fills says the rest."""
    first = "cheapest" if plan.objective is Objective.COST else "fastest"
    kind = "spot" if plan.constraints.spot else "on demand"
    table = _bare_table(f"Candidates, {first} first, {kind}")
    wide, with_region = width >= WIDE, has_several_regions(plan.choice.candidates)
    table.add_column("")
    table.add_column("Node type", no_wrap=wide)
    table.add_column("GPUs")
    for name in ("$/hour", "Hours", "$ run", *(("GiB each", "Tokens/s", "Settings") if wide else ())):
        table.add_column(name, justify="left" if name == "Settings" else "right", no_wrap=name != "Settings")
    for number, candidate in enumerate(plan.choice.candidates):
        row = _row(candidate, wide=wide, with_region=with_region)
        table.add_row(">" if number == 0 else "", *row, style="bold" if number == 0 else "")
    return table


def _row(found: Candidate, *, wide: bool, with_region: bool) -> list[str | Text]:
    node_type = found.node_type
    row: list[str | Text] = [
        Text(machines_text(found, with_region=with_region) + ("" if wide else f"\n{settings_text(found)}")),
        Text(f"{found.nodes * node_type.gpus} {node_type.gpu.name}"),
        f"{found.usd_per_hour:,.2f}",
        f"{found.hours:,.1f}",
        f"{found.usd:,.2f}",
    ]
    if wide:
        row += [
            f"{_gib(found.memory.gpu.total_bytes)}/{_gib(node_type.gpu.memory_bytes)}",
            f"{found.throughput.tokens_per_second:,.0f}",
            Text(settings_text(found)),
        ]
    return row


def _bare_table(title: str) -> Table:
    return Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _chosen(found: Candidate) -> str:
    return f"Chosen: {machines_text(found)}, {speed_text(found.throughput)}. It fills"


def _memory(found: Setup) -> Table:
    table = _bare_table("")
    table.add_column("Memory")
    table.add_column("GiB", justify="right")
    table.add_column("of", justify="right")
    table.add_column("")
    for name, used, capacity in memory_rows(found):
        bar = ProgressBar(total=max(capacity, 1), completed=used, width=BAR_WIDTH)
        table.add_row(name, _gib(used), _gib(capacity), bar)
    return table


def _print_miss(console: Console, plan: GpuPlan) -> None:
    console.print(Text("\nNothing fits.", style="bold red"))
    for line in miss_lines(plan):
        console.print(Text(line))


def _print_refused(console: Console, plan: GpuPlan, *, show_all: bool) -> None:
    lines = [(one.node_type_id, one.reason) for one in plan.refused] if show_all else grouped(plan)
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


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"
