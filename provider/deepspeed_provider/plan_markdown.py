# SPDX-License-Identifier: Apache-2.0
"""A plan as Markdown, for a page on which somebody decides whether it may cost that much."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from deepspeed_provider.clusters.candidate import Candidate
from deepspeed_provider.clusters.given import Fitted
from deepspeed_provider.clusters.gpu_plan import GpuPlan
from deepspeed_provider.clusters.job import Objective
from deepspeed_provider.clusters.node_type import OWN_PRICE
from deepspeed_provider.plan_texts import (
    given_text,
    grouped,
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

GIB: Final = 2**30
_COLUMNS: Final = (
    *("", "Node type", "GPUs", "$/hour", "Hours", "$ run"),
    *("GiB each", "Tokens/s", "Settings", "Region", "Prices of"),
)
_NUMBERS: Final = ("$/hour", "Hours", "$ run", "GiB each", "Tokens/s")
_SPECIAL: Final = re.compile(r"([\\`*|<>\[\]])")


def plan_markdown(found: Planned) -> str:
    """The table with the chosen row in bold, what it rests on, and refusals by reason."""
    plan = found.plan
    best = plan.choice.best
    return "\n\n".join(
        [
            f"### {_plain(found.model)}",
            _plain(job_line(plan.job)),
            *(_nothing(plan) if best is None else [_chosen(best), _table(plan)]),
            *_section(f"Not chosen: {len(plan.refused)} node types", map(": ".join, grouped(plan))),
            *_section("Warnings", plan.warnings),
            *_section("Assumptions", found.assumptions),
        ]
    )


def given_markdown(found: PlannedOnGiven) -> str:
    """Settings for hardware that is there, or what is missing, and what they rest on."""
    plan, machines = found.plan, given_text(found.plan.hardware)
    if isinstance(plan.fitted, Fitted):
        speed = f"{speed_text(plan.fitted.throughput)}, {time_and_price(plan.fitted)}."
        filled = "; ".join(
            f"{name} {used / GIB:,.1f} of {capacity / GIB:,.1f} GiB"
            for name, used, capacity in memory_rows(plan.fitted)
        )
        settings = _plain(settings_text(plan.fitted))
        chosen = [f"**{_plain(machines)}: {settings}**", _plain(speed), f"It fills: {filled}."]
    else:
        chosen = [f"**Nothing fits {_plain(machines)}.**", _plain(f"Nearest: {plan.fitted}.")]
    return "\n\n".join(
        [
            f"### {_plain(found.model)}",
            _plain(job_line(plan.job)),
            *chosen,
            *_section("Warnings", plan.warnings),
            *_section("Assumptions", found.assumptions),
        ]
    )


def _nothing(plan: GpuPlan) -> list[str]:
    return ["**Nothing fits.**", *map(_plain, miss_lines(plan))]


def _chosen(best: Candidate) -> str:
    kind = "spot" if best.spot else "on demand"
    return (
        f"**{_plain(machines_text(best))}: ${best.usd:,.2f}** for {best.hours:,.1f} h at ${best.usd_per_hour:,.2f} an "
        f"hour, {kind} in {_plain(_region(best))} by {_plain(_prices(best))}."
    )


def _table(plan: GpuPlan) -> str:
    first = "cheapest" if plan.objective is Objective.COST else "fastest"
    rows = [_row(number, candidate) for number, candidate in enumerate(plan.choice.candidates)]
    rule = ["---:" if name in _NUMBERS else "---" for name in _COLUMNS]
    lines = [f"| {' | '.join(cells)} |" for cells in (_COLUMNS, rule, *rows)]
    return "\n".join([f"Candidates, {first} first:", "", *lines])


def _row(number: int, found: Candidate) -> list[str]:
    node_type = found.node_type
    cells = [
        machines_text(found),
        f"{found.nodes * node_type.gpus} {node_type.gpu.name}",
        f"{found.usd_per_hour:,.2f}",
        f"{found.hours:,.1f}",
        f"{found.usd:,.2f}",
        f"{found.memory.gpu.total_bytes / GIB:,.1f}/{node_type.gpu.memory_bytes / GIB:,.1f}",
        f"{found.throughput.tokens_per_second:,.0f}",
        settings_text(found),
        _region(found),
        _date(found),
    ]
    plain = [_plain(cell) for cell in cells]
    return ["➤", *(f"**{cell}**" for cell in plain)] if number == 0 else ["", *plain]


def _region(found: Candidate) -> str:
    return found.node_type.region or "an unnamed region"


def _date(found: Candidate) -> str:
    return found.node_type.price_date or "an unknown date"


def _prices(found: Candidate) -> str:
    date = _date(found)
    return date if date == OWN_PRICE else f"prices of {date}"


def _section(title: str, lines: Iterable[str]) -> list[str]:
    items = [f"- {_plain(line)}" for line in lines]
    return [f"**{title}**", "\n".join(items)] if items else []


def _plain(text: str) -> str:
    """Names come from configs and tables of users: none of it is markup, or ends its line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
