# SPDX-License-Identifier: Apache-2.0
"""What comes next, as tables."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from deepspeed_provider.backends.base import RunHandle, RunState
from deepspeed_provider.errors import Failure, FailureKind
from deepspeed_provider.runs.record import (
    OnClear,
    Opening,
    Outcome,
    Phase,
    RunRecord,
    Verdict,
    opening,
    verdict,
)

HANDLE = RunHandle(backend="fake", token="t", generation=1, output_uri="mem://o", world_size=2, ids={"a": "b"})
RECORD = RunRecord(key="k", generation=1, digest="d", handle=HANDLE, max_tries=1, deadline_s=100.0)
SUBMITTED = RECORD.submitted()
NO_ROWS = Failure(kind=FailureKind.USER, message="no rows", evidence="failure file of rank 0", rank=0)
NO_MACHINES = Failure(kind=FailureKind.CAPACITY, message="no machines", evidence="termination code")
FOR_GOOD = RECORD.closed(Outcome.FAILED, NO_ROWS)
TOO_LATE = RECORD.closed(Outcome.OVERDUE, NO_MACHINES)


@pytest.mark.parametrize("record", [RECORD, SUBMITTED, RECORD.closed(Outcome.FAILED), FOR_GOOD])
def test_a_record_survives_as_json(record: RunRecord) -> None:
    assert RunRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_a_judgement_is_kept_however_long_its_reason_is() -> None:
    long = replace(NO_ROWS, message="m" * 100_000, detail="first" + "d" * 100_000 + "last")
    wire = json.dumps(RECORD.closed(Outcome.FAILED, long).to_json())
    assert len(wire) < 65_535, "what the task state store takes"
    kept = RunRecord.from_json(json.loads(wire)).failure
    assert kept is not None
    assert kept.detail.endswith("last"), "where the cause stands"


def test_a_record_of_another_version_is_read() -> None:
    wire = {name: value for name, value in RECORD.to_json().items() if name not in ("replacements", "mlflow_url")}
    assert RunRecord.from_json({**wire, "a_field_of_tomorrow": 1}) == RECORD


@pytest.mark.parametrize(
    ("record", "max_tries", "on_clear", "first"),
    [
        pytest.param(None, 1, "attach", Opening.MINT, id="nothing known"),
        pytest.param(RECORD, 1, "attach", Opening.ATTACH, id="died before submission was noted"),
        pytest.param(SUBMITTED, 1, "attach", Opening.ATTACH, id="retry"),
        pytest.param(SUBMITTED, 1, "restart", Opening.ATTACH, id="retry is no clear"),
        pytest.param(SUBMITTED, 2, "attach", Opening.ATTACH, id="cleared, attach"),
        pytest.param(SUBMITTED, 2, "restart", Opening.RESTART, id="cleared, restart"),
        pytest.param(RECORD.closed(Outcome.FAILED), 1, "attach", Opening.MINT, id="retry after a failure"),
        pytest.param(RECORD.closed(Outcome.FAILED), 2, "restart", Opening.MINT, id="cleared after a failure"),
        pytest.param(RECORD.closed(Outcome.OVERDUE), 2, "attach", Opening.MINT, id="cleared after the deadline"),
        pytest.param(FOR_GOOD, 1, "attach", Opening.REPORT, id="died reporting a failure for good"),
        pytest.param(FOR_GOOD, 2, "attach", Opening.MINT, id="cleared after a failure for good"),
        pytest.param(TOO_LATE, 1, "attach", Opening.REPORT, id="died reporting the deadline"),
        pytest.param(RECORD.closed(Outcome.FAILED, NO_MACHINES), 1, "attach", Opening.MINT, id="no machines, again"),
        pytest.param(RECORD.closed(Outcome.SUCCEEDED), 1, "attach", Opening.ATTACH, id="died reporting a success"),
        pytest.param(RECORD.closed(Outcome.SUCCEEDED), 2, "attach", Opening.MINT, id="cleared after a success"),
    ],
)
def test_opening(record: RunRecord | None, max_tries: int, on_clear: str, first: Opening) -> None:
    assert opening(record, max_tries=max_tries, on_clear=OnClear(on_clear)) is first


@pytest.mark.parametrize("state", [RunState.PENDING, RunState.RUNNING, RunState.TERMINATING])
@pytest.mark.parametrize("record", [RECORD, SUBMITTED], ids=lambda r: r.phase)
def test_an_active_run_is_waited_for_until_the_deadline(record: RunRecord, state: RunState) -> None:
    assert verdict(record, state, now_s=99.9) is Verdict.WAIT
    assert verdict(record, state, now_s=100.0) is Verdict.STOP
    assert verdict(replace(record, deadline_s=None), state, now_s=1e12) is Verdict.WAIT


@pytest.mark.parametrize(
    ("record", "state", "stored", "started", "now_s", "action"),
    [
        pytest.param(SUBMITTED, "SUCCEEDED", False, False, 1, Verdict.COLLECT, id="success"),
        pytest.param(SUBMITTED, "SUCCEEDED", False, False, 999, Verdict.COLLECT, id="success after the deadline"),
        pytest.param(SUBMITTED, "FAILED", False, True, 1, Verdict.DIAGNOSE, id="failure"),
        pytest.param(SUBMITTED, "FAILED", True, True, 1, Verdict.COLLECT, id="failed after its result"),
        pytest.param(SUBMITTED, "LOST", True, True, 1, Verdict.COLLECT, id="lost after its result"),
        pytest.param(SUBMITTED, "CANCELLED", True, True, 999, Verdict.COLLECT, id="cancelled after its result"),
        pytest.param(SUBMITTED, "LOST", False, True, 1, Verdict.REPLACE, id="lost"),
        pytest.param(SUBMITTED, "CANCELLED", False, True, 1, Verdict.REPLACE, id="cancelled by the platform"),
        pytest.param(SUBMITTED, "CANCELLED", False, True, 999, Verdict.OVERDUE, id="cancelled at the deadline"),
        pytest.param(SUBMITTED, "LOST", False, True, 999, Verdict.OVERDUE, id="lost after the deadline"),
        pytest.param(RECORD, "LOST", False, False, 1, Verdict.SUBMIT, id="never arrived"),
        pytest.param(RECORD, "LOST", False, True, 1, Verdict.REPLACE, id="arrived, started and was lost"),
        pytest.param(RECORD, "LOST", False, False, 999, Verdict.OVERDUE, id="never arrived in time"),
        pytest.param(RECORD, "UNSEEN", False, False, 1, Verdict.SUBMIT, id="nobody knows whether it arrived"),
        pytest.param(RECORD, "UNSEEN", False, False, 999, Verdict.OVERDUE, id="nor does anybody in time"),
        pytest.param(replace(SUBMITTED, replacements=3), "LOST", False, True, 1, Verdict.GIVE_UP, id="once too often"),
    ],
)
def test_an_ended_run(
    record: RunRecord, state: str, stored: bool, started: bool, now_s: float, action: Verdict
) -> None:
    found = verdict(record, RunState(state), now_s=now_s, has_stored_result=stored, has_started=started)
    assert found is action


def test_what_a_person_cancels_is_not_run_again() -> None:
    assert verdict(SUBMITTED, RunState.CANCELLED, now_s=1, by_person=True) is Verdict.ACCEPT
    assert verdict(SUBMITTED, RunState.CANCELLED, now_s=1, by_person=True, has_stored_result=True) is Verdict.COLLECT
    assert verdict(SUBMITTED, RunState.CANCELLED, now_s=999, by_person=True) is Verdict.OVERDUE


def test_closing_keeps_the_identity() -> None:
    closed = SUBMITTED.closed(Outcome.CANCELLED)
    assert (closed.handle, closed.generation, closed.phase) == (HANDLE, 1, Phase.CLOSED)
