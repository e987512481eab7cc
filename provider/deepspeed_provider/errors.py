# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a run, and whether trying again can help."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

T = TypeVar("T")


class FailureKind(StrEnum):
    """Cause of a failed run. Retryability belongs to the kind, never to the text of a message."""

    USER = "USER"
    GPU_OOM = "GPU_OOM"
    HOST_OOM = "HOST_OOM"
    CAPACITY = "CAPACITY"
    TRANSIENT = "TRANSIENT"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed when it is simply run again."""
        return self in (FailureKind.CAPACITY, FailureKind.TRANSIENT, FailureKind.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One judged failure: its kind, what a person reads, and where the evidence came from.

    ``evidence`` names the source of the judgement ("failure file of rank 1", "operation error", …).
    """

    kind: FailureKind
    message: str
    evidence: str
    rank: int | None = None
    step: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        when = "" if self.step is None else f" at step {self.step}"
        text = f"{self.kind}{where}{when}: {self.message} (from the {self.evidence})"
        return f"{text}\n{self.detail}" if self.detail else text


class FineTuneError(Exception):
    """A run failed; ``failure`` says how and why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """One thing wrong with one field of a user's input, and the nearest thing that would work."""

    field: str
    value: Any
    problem: str
    suggestion: str = ""

    def __str__(self) -> str:
        hint = f" {self.suggestion}" if self.suggestion else ""
        return f"{self.field} = {self.value!r}: {self.problem}.{hint}"


def nearest(word: Any, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known word that ``word`` most likely meant, capitals aside, or None."""
    listed = {name.lower(): name for name in known}
    found = difflib.get_close_matches(str(word).strip().lower(), listed, n=1, cutoff=cutoff)
    return listed[found[0]] if found else None


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """What would work in place of a name that is not known."""
    names = list(known)
    near = nearest(word, names)
    return f"Did you mean {near!r}?" if near else f"Known are {', '.join(names)}."


class SpecError(ValueError):
    """A user's input cannot be used; carries every problem found, not just the first."""

    def __init__(self, problems: list[FieldProblem]) -> None:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        count = len(problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} in the request:\n{lines}")
        self.problems = problems

    @classmethod
    def of(cls, field: str, value: Any, problem: str, suggestion: str = "") -> SpecError:
        """With one problem."""
        return cls([FieldProblem(field=field, value=value, problem=problem, suggestion=suggestion)])


def tried(make: Callable[[], T], problems: list[FieldProblem]) -> T | None:
    """What ``make`` returns; None where it raises :class:`SpecError`, whose problems are added to the list."""
    try:
        return make()
    except SpecError as error:
        problems += [problem for problem in error.problems if problem not in problems]
        return None


class EngineError(RuntimeError):
    """The embedded engine or a service beside it cannot start or answer; the text says what to do."""
