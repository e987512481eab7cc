"""What the Jobs API says, in this provider's terms: both of its models, known words and unknown ones."""

from __future__ import annotations

import pytest
from databricks.sdk.service import compute, jobs
from deepspeed_provider.backends.base import RunState
from deepspeed_provider.backends.jobs_states import (
    CAPACITY_REASONS,
    HOST_MEMORY_REASONS,
    TERMINATIONS,
    billed_seconds,
    latest_attempts,
    status_of,
)

TOO_NEW = "SOMETHING_NEW"


def old(life_cycle_state, result_state=None, message=""):
    return {"state": {"life_cycle_state": life_cycle_state, "result_state": result_state, "state_message": message}}


def new(state, code=None, message=""):
    details = {} if code is None else {"termination_details": {"code": code, "message": message}}
    return {"status": {"state": state, **details}}


CASES = {
    "queued": (new("QUEUED"), RunState.PENDING),
    "pending": (new("PENDING"), RunState.PENDING),
    "blocked, older model": (old("BLOCKED"), RunState.PENDING),
    "waiting for retry": (new("WAITING"), RunState.PENDING),
    "running": (new("RUNNING"), RunState.RUNNING),
    "terminating": (new("TERMINATING"), RunState.TERMINATING),
    "a state that is not known yet": (new(TOO_NEW), RunState.RUNNING),
    "a life cycle that is not known yet": (old(TOO_NEW), RunState.RUNNING),
    "no state at all": ({}, RunState.RUNNING),
    "success": (new("TERMINATED", "SUCCESS"), RunState.SUCCEEDED),
    "success, older model": (old("TERMINATED", "SUCCESS"), RunState.SUCCEEDED),
    "failed user code": (old("INTERNAL_ERROR", "FAILED") | new("TERMINATED", "RUN_EXECUTION_ERROR"), RunState.FAILED),
    "time limit": (old("TERMINATED", "TIMEDOUT") | new("TERMINATED", "CANCELED"), RunState.FAILED),
    "time limit, older model": (old("TERMINATED", "TIMEDOUT"), RunState.FAILED),
    "some tasks failed": (old("TERMINATED", "SUCCESS_WITH_FAILURES"), RunState.FAILED),
    "skipped": (old("SKIPPED"), RunState.FAILED),
    "a code that is not known yet": (new("TERMINATED", TOO_NEW), RunState.FAILED),
    "cancelled": (new("TERMINATED", "USER_CANCELED"), RunState.CANCELLED),
    "cancelled, older model": (old("TERMINATED", "CANCELED"), RunState.CANCELLED),
}


@pytest.mark.parametrize(("run", "state"), CASES.values(), ids=CASES)
def test_state(run, state):
    assert status_of(run).state is state


@pytest.mark.parametrize("named", [each.value for each in jobs.RunLifecycleStateV2State])
def test_every_state_of_the_api_is_placed(named):
    assert status_of(new(named, "SUCCESS" if named == "TERMINATED" else None)).state.terminal == (named == "TERMINATED")


def test_only_a_person_cancels_by_person():
    assert status_of(new("TERMINATED", "USER_CANCELED")).by_person
    assert not status_of(new("TERMINATED", "CANCELED")).by_person


def test_the_detail_has_the_code_and_the_message():
    assert status_of(new("TERMINATED", "CLOUD_FAILURE", "no machines")).detail == "CLOUD_FAILURE: no machines"
    assert status_of({"status": {"state": "QUEUED", "queue_details": {"message": "full"}}}).detail == "QUEUED: full"


def test_every_code_of_the_api_has_its_meaning():
    known = {each.value for each in jobs.TerminationCodeCode} - {"SUCCESS", "BREAKING_CHANGE"}
    assert known <= set(TERMINATIONS)


def test_reasons_of_a_cluster_are_the_apis():
    assert {each.value for each in compute.TerminationReasonCode} >= CAPACITY_REASONS | set(HOST_MEMORY_REASONS)


def test_of_each_task_the_last_attempt_and_the_earliest_end_first():
    attempts = [("b", 1, 50), ("a", 0, 70), ("b", 0, 20), ("c", 0, 0)]
    tasks = [{"task_key": key, "attempt_number": number, "end_time": end} for key, number, end in attempts]
    assert [(task["task_key"], task["attempt_number"]) for task in latest_attempts({"tasks": tasks})] == [
        ("b", 1),
        ("a", 0),
        ("c", 0),
    ]


def test_time_that_is_paid_for_counts_from_the_cluster_on():
    over = {"start_time": 1_000, "end_time": 61_000}
    going_on = {"start_time": 100_000, "end_time": 0}
    assert billed_seconds({"tasks": [over, going_on, {"task_key": "queued"}]}, now_ms=130_000) == 60 + 30
    assert billed_seconds({"tasks": [{**over, "queue_duration": 45_000}]}, now_ms=130_000) == 15
