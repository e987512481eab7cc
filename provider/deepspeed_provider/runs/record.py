# SPDX-License-Identifier: Apache-2.0
"""What is known about a task's run, written before anything is submitted, and what to do next with it.

Pure: given the record, the state of the run and the clock, each function names the next action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

from deepspeed_provider.backends.base import RunHandle, RunState
from deepspeed_provider.errors import Failure, FailureKind

MAX_REPLACEMENTS = 3
LONGEST_MESSAGE = 1_000
LONGEST_DETAIL = 4_000


class Phase(StrEnum):
    """How far a generation has come."""

    MINTED = "minted"
    """Its identity is stored; it may or may not have arrived at the cluster."""
    SUBMITTED = "submitted"
    CLOSED = "closed"
    """Judged. Whatever comes next is another generation."""


class Outcome(StrEnum):
    """The judgement that closed a generation."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    OVERDUE = "overdue"


class OnClear(StrEnum):
    """What clearing a task does to its run that is still alive."""

    ATTACH = "attach"
    RESTART = "restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One task's current run, as kept in the task state store.

    Attributes:
        key: dag, run, task and map index.
        generation: counts from 1; runs judged before this one plus one.
        digest: of the request as it was when the identity was minted.
        deadline_s: seconds since the epoch; None waits for ever.
        max_tries: the task instance's, when the record was last taken up; it grows when somebody clears
            the task, and never on a retry.
        replacements: generations minted within one execution since a platform lost or cancelled a run.
        failure: why it was judged a failure.
        found_ending: the run was on its way out when an execution found it, so that nobody has cancelled it since.
    """

    key: str
    generation: int
    digest: str
    handle: RunHandle
    phase: Phase = Phase.MINTED
    outcome: Outcome | None = None
    mlflow_run_id: str | None = None
    mlflow_url: str | None = None
    deadline_s: float | None = None
    max_tries: int = 0
    replacements: int = 0
    failure: Failure | None = None
    found_ending: bool = False

    def submitted(self) -> RunRecord:
        return replace(self, phase=Phase.SUBMITTED)

    def closed(self, outcome: Outcome, failure: Failure | None = None) -> RunRecord:
        return replace(self, phase=Phase.CLOSED, outcome=outcome, failure=None if failure is None else _kept(failure))

    @property
    def failed_for_good(self) -> bool:
        """Whether a run of the same request would only fail again, or spend a budget twice."""
        return self.failure is not None and (not self.failure.kind.retryable or self.outcome is Outcome.OVERDUE)

    def overdue(self, now_s: float) -> bool:
        return self.deadline_s is not None and now_s >= self.deadline_s

    def to_json(self) -> dict[str, Any]:
        wire = {field.name: getattr(self, field.name) for field in fields(self)}
        outcome = None if self.outcome is None else self.outcome.value
        failure = None if self.failure is None else asdict(self.failure)
        return {
            **wire,
            "handle": self.handle.to_json(),
            "phase": self.phase.value,
            "outcome": outcome,
            "failure": failure,
        }

    @classmethod
    def from_json(cls, wire: Mapping[str, Any]) -> RunRecord:
        """Reads records of older and newer versions too. Raises KeyError or ValueError for what is no record."""
        values = {field.name: wire[field.name] for field in fields(cls) if field.name in wire}
        values["handle"] = RunHandle.from_json(wire["handle"])
        values["phase"] = Phase(wire["phase"])
        values["outcome"] = None if wire.get("outcome") is None else Outcome(wire["outcome"])
        if (failure := wire.get("failure")) is not None:
            values["failure"] = Failure(**{**failure, "kind": FailureKind(failure["kind"])})
        return cls(**values)


def _kept(failure: Failure) -> Failure:
    """With its texts cut: the task state store takes 64 KiB, and a judgement must not be lost for its length."""
    return replace(failure, message=failure.message[:LONGEST_MESSAGE], detail=failure.detail[-LONGEST_DETAIL:])


class Opening(StrEnum):
    """What an execution does first."""

    MINT = "mint"
    ATTACH = "attach"
    RESTART = "restart"
    REPORT = "report"
    """It was judged a failure for good, and whoever judged it did not live to say so."""


def opening(record: RunRecord | None, *, max_tries: int, on_clear: OnClear) -> Opening:
    """What an execution that finds ``record`` does first."""
    if record is None:
        return Opening.MINT
    cleared = max_tries > record.max_tries
    if record.phase is Phase.CLOSED:
        # Airflow repeats neither a success nor a failure for good by itself: not cleared, this is a worker that died
        # between the judgement and its report, and what was paid for is still there.
        if cleared:
            return Opening.MINT
        if record.failed_for_good:
            return Opening.REPORT
        return Opening.ATTACH if record.outcome is Outcome.SUCCEEDED else Opening.MINT
    return Opening.RESTART if cleared and on_clear is OnClear.RESTART else Opening.ATTACH


class Verdict(StrEnum):
    """What the state of a run asks for."""

    WAIT = "wait"
    SUBMIT = "submit"
    COLLECT = "collect"
    """The result is there: from the cluster, or from its file."""
    DIAGNOSE = "diagnose"
    STOP = "stop"
    """The deadline has passed: cancel and watch it stop."""
    REPLACE = "replace"
    GIVE_UP = "give up"
    """Lost or cancelled by the platform once too often."""
    ACCEPT = "accept"
    """A person has cancelled it on the cluster."""
    OVERDUE = "overdue"


def verdict(
    record: RunRecord,
    state: RunState,
    *,
    now_s: float,
    has_stored_result: bool = False,
    has_started: bool = False,
    by_person: bool = False,
    max_replacements: int = MAX_REPLACEMENTS,
) -> Verdict:
    """What to do with a run in ``state``.

    Args:
        has_stored_result: the run's own result file is there. Only looked at for a run that ended without
            a success, as a platform may lose a run whose work is done.
        has_started: a rank has left a mark of its start. Tells a run that never arrived from one that was
            lost before its submission was noted.
        by_person: it was cancelled on the cluster while somebody here waited for it.
    """
    if state is RunState.UNSEEN:
        return Verdict.OVERDUE if record.overdue(now_s) else Verdict.SUBMIT
    if not state.terminal:
        return Verdict.STOP if record.overdue(now_s) else Verdict.WAIT
    if state is RunState.SUCCEEDED or has_stored_result:
        return Verdict.COLLECT
    if state is RunState.FAILED:
        return Verdict.DIAGNOSE
    if record.overdue(now_s):
        return Verdict.OVERDUE
    if by_person and state is RunState.CANCELLED:
        return Verdict.ACCEPT
    if state is RunState.LOST and record.phase is Phase.MINTED and not has_started:
        return Verdict.SUBMIT
    return Verdict.REPLACE if record.replacements < max_replacements else Verdict.GIVE_UP
