# SPDX-License-Identifier: Apache-2.0
"""Batch size, micro-batch and accumulation: DeepSpeed demands that their product with the world size be exact."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, Final

from deepspeed_provider.deepspeed_config.findings import Facts, Found, Severity
from deepspeed_provider.deepspeed_config.rules.rule import Example, Rule
from deepspeed_provider.deepspeed_config.subject import AUTO, Subject

TOTAL: Final = "train_batch_size"
MICRO: Final = "train_micro_batch_size_per_gpu"
STEPS: Final = "gradient_accumulation_steps"


def _missing(subject: Subject) -> Iterable[Found]:
    if subject.config.get(TOTAL) is None and subject.config.get(MICRO) is None:
        text = f"neither {TOTAL} nor {MICRO} is there."
        yield Found(path="", value=None, problem=text, suggestion=f"Add {MICRO}, such as 1.")


def _not_counts(subject: Subject) -> Iterable[Found]:
    for name in (TOTAL, MICRO, STEPS):
        value = subject.config.get(name)
        if value is not None and value != AUTO and not _is_count(value):
            hint = f"Write {max(1, round(value))}." if _is_number(value) else "Write a number such as 1."
            yield Found(path=name, value=value, problem="should be a whole number, 1 or more.", suggestion=hint)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _parallel(subject: Subject) -> int:
    """Ranks that work on the same sequences: tensor and sequence parallelism."""
    sizes = (subject.get("tensor_parallel.autotp_size"), subject.get("sequence_parallel_size"))
    return prod(size for size in sizes if _is_count(size))


def _ranks_do_not_split(subject: Subject) -> Iterable[Found]:
    ranks, parallel = subject.facts.world_size, _parallel(subject)
    if ranks is not None and ranks % parallel:
        text = f"{ranks} ranks cannot be split into groups of {parallel} (tensor x sequence parallelism)."
        works = f"Use {_listed(_multiples(ranks, parallel))} ranks."
        yield Found(path="", value=None, problem=text, suggestion=works)


def _inexact(subject: Subject) -> Iterable[Found]:
    """With the world size, or where it is not known, for any."""
    total: Any = subject.config.get(TOTAL)
    micro, steps = subject.config.get(MICRO), subject.config.get(STEPS)
    if not _is_count(total) or any(value is not None and not _is_count(value) for value in (micro, steps)):
        return
    ranks = subject.facts.world_size
    ranks = None if ranks is None else max(1, ranks // _parallel(subject))
    parts = {MICRO: micro, STEPS: steps, "the number of ranks": ranks}
    unit = prod(value for value in parts.values() if value is not None)
    complete = all(value is not None for value in parts.values())
    if total == unit or (total % unit == 0 and not complete):
        return
    names = " x ".join(f"{value} ({name})" for name, value in parts.items() if value is not None)
    text = f"is not {names} = {unit}." if complete else f"is no multiple of {names} = {unit}."
    yield Found(path=TOTAL, value=total, problem=text, suggestion=_works(total, micro, steps, ranks))


def _works(total: int, micro: int | None, steps: int | None, ranks: int | None) -> str:
    """The nearest totals for the given parts, and the nearest accumulation for the given total."""
    unit = (micro or 1) * (steps or 1) * (ranks or 1)
    if micro is None or steps is None or ranks is None:
        return f"Use {TOTAL} {_listed(_multiples(total, unit))}."
    if total % (micro * ranks) == 0:
        return f"Use {STEPS} {total // (micro * ranks)}, or {TOTAL} {unit}."
    others = [size for size in _multiples(total, micro * ranks) if size != unit]
    near = "".join(f", or {size} with {STEPS} {size // (micro * ranks)}" for size in others)
    return f"Use {TOTAL} {unit}{near}."


def _multiples(number: int, unit: int) -> list[int]:
    """The nearest on both sides, above zero."""
    below = number // unit * unit
    return [size for size in (below, below + unit) if size > 0]


def _listed(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))


RULES: Final = (
    Rule(
        name="batch-missing",
        severity=Severity.ERROR,
        why="DeepSpeed needs the batch size, or that of one rank.",
        find=_missing,
        accepted=Example({MICRO: 1}),
        refused=Example({STEPS: 4}),
    ),
    Rule(
        name="batch-not-a-count",
        severity=Severity.ERROR,
        why="DeepSpeed divides the three numbers, and fails or rounds for anything but counts.",
        find=_not_counts,
        accepted=Example({TOTAL: 8, MICRO: 1}),
        refused=Example({TOTAL: 8, MICRO: 0.5}),
    ),
    Rule(
        name="batch-does-not-fit",
        severity=Severity.ERROR,
        why="DeepSpeed refuses a batch size that is not micro-batch x accumulation x ranks, once it runs on them.",
        find=_inexact,
        accepted=Example({TOTAL: 32, MICRO: 2, STEPS: 4}, Facts(world_size=4)),
        refused=Example({TOTAL: 30, MICRO: 2, STEPS: 4}, Facts(world_size=4)),
    ),
    Rule(
        name="ranks-do-not-split",
        severity=Severity.ERROR,
        why="Ranks are grouped for tensor and sequence parallelism.",
        find=_ranks_do_not_split,
        accepted=Example({MICRO: 1, "tensor_parallel": {"autotp_size": 2}}, Facts(world_size=8)),
        refused=Example({MICRO: 1, "tensor_parallel": {"autotp_size": 3}}, Facts(world_size=8)),
    ),
)
