# SPDX-License-Identifier: Apache-2.0
"""Exactly once, in blocking and in deferrable mode, against a cluster in memory."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    TaskDeferred,
)
from deepspeed_provider.backends.base import RunState
from deepspeed_provider.testing.memory_cluster import FakeCluster
from deepspeed_provider.testing.run_scripts import fails as failing

from operators.fake_task import TERMINAL, Crash, FakeTask, cluster_of, crash_at, run_to_end, store_result

FOREVER = (RunState.RUNNING,)


def test_one_run_and_its_result(deferrable: bool) -> None:
    task = FakeTask()
    output = run_to_end(task, deferrable)
    assert output["generation"] == 1
    assert len(task.cluster.runs) == 1
    assert task.record["phase"] == "closed"
    assert task.record["outcome"] == "succeeded"
    assert task.xcoms == {"spark_ui_url": "http://spark.example:4040"}


def test_the_identity_is_stored_before_anything_is_submitted() -> None:
    seen: list[Any] = []
    task = FakeTask()
    task.cluster.on_call = lambda verb, moment: seen.append((verb, moment, task.record and task.record["phase"]))
    run_to_end(task, False)
    assert next(entry for entry in seen if entry[0] == "submit") == ("submit", "before", "minted")


@pytest.mark.parametrize("moment", range(1, 40))
def test_a_worker_killed_at_any_instruction_leaves_one_run(moment: int, deferrable: bool) -> None:
    task = FakeTask()
    task.store.on_call = task.cluster.on_call = crash_at(moment)
    outputs = []
    for _ in range(3):
        try:
            outputs.append(run_to_end(task, deferrable))
            break
        except Crash:
            continue
    assert len(outputs) == 1
    assert len(task.cluster.runs) == 1
    assert task.cluster.cancels == 0
    assert outputs[0]["generation"] == 1


def test_a_worker_killed_after_its_judgement_does_not_pay_twice() -> None:
    task = FakeTask()
    first = run_to_end(task, False)
    assert run_to_end(task, False) == first
    assert len(task.cluster.runs) == 1


def test_clearing_a_success_starts_anew(deferrable: bool) -> None:
    task = FakeTask()
    run_to_end(task, deferrable)
    task.clear()
    assert run_to_end(task, deferrable)["generation"] == 2
    assert len(task.cluster.runs) == 2


def test_a_retry_after_a_failure_starts_anew(deferrable: bool) -> None:
    task = FakeTask(cluster=cluster_of((RunState.RUNNING, RunState.FAILED)))
    with pytest.raises(AirflowException):
        run_to_end(task, deferrable)
    assert run_to_end(task, deferrable)["generation"] == 2
    assert len(task.cluster.runs) == 2


def test_clearing_a_live_run_attaches_to_it() -> None:
    task = FakeTask()
    with pytest.raises(TaskDeferred):
        task.execute(deferrable=True)
    task.clear()
    assert run_to_end(task, True)["generation"] == 1
    assert len(task.cluster.runs) == 1
    assert task.cluster.cancels == 0


def test_clearing_with_restart_stops_the_live_run_first() -> None:
    task = FakeTask(options={"on_clear": "restart"}, cluster=cluster_of(FOREVER, stop_polls=3))
    with pytest.raises(TaskDeferred):
        task.execute(deferrable=True)
    assert run_to_retry(task) is None
    task.clear()
    alive: list[int] = []
    task.cluster.on_call = lambda verb, moment: alive.append(task.cluster.alive)
    assert run_to_end(task, True)["generation"] == 2
    assert max(alive) == 1
    assert task.cluster.cancels == 1


def run_to_retry(task: FakeTask) -> None:
    """A retry, which is no clear: it must attach even with on_clear='restart'."""
    with pytest.raises(TaskDeferred):
        task.execute(deferrable=True)
    assert task.cluster.cancels == 0


def test_the_stored_identity_wins_over_a_changed_request() -> None:
    task = FakeTask(cluster=cluster_of((RunState.RUNNING,) * 3 + (RunState.SUCCEEDED,)))
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(deferrable=True, payload=1)
    assert task.resume(deferred.value, TERMINAL, payload=2)["generation"] == 1
    assert len(task.cluster.runs) == 1


@pytest.mark.parametrize(
    "script",
    [
        pytest.param((RunState.RUNNING, RunState.CANCELLED), id="cancelled by the platform"),
        pytest.param((RunState.RUNNING, RunState.LOST), id="lost with its server"),
    ],
)
def test_a_run_ended_by_the_platform_is_replaced_in_the_same_execution(script: Any, deferrable: bool) -> None:
    task = FakeTask(cluster=cluster_of(script))
    assert run_to_end(task, deferrable)["generation"] == 2
    assert len(task.cluster.runs) == 2


@pytest.mark.parametrize("state", [RunState.CANCELLED, RunState.LOST, RunState.FAILED])
def test_a_stored_result_is_a_success_whatever_the_platform_says(state: RunState, deferrable: bool) -> None:
    task = FakeTask(cluster=cluster_of((RunState.RUNNING, state)))
    task.cluster.on_call = lambda verb, moment: store_result(task)
    assert run_to_end(task, deferrable)["model_uri"] == "mem://m"
    assert len(task.cluster.runs) == 1


def test_another_runs_result_is_not_taken() -> None:
    task = FakeTask(cluster=cluster_of((RunState.RUNNING, RunState.LOST)))
    task.cluster.on_call = lambda verb, moment: store_result(task, token="somebody else's")
    assert run_to_end(task, False)["generation"] == 2


def test_replacing_ends_after_three_times(deferrable: bool) -> None:
    task = FakeTask(cluster=cluster_of(*[(RunState.LOST,)] * 10))
    with pytest.raises(AirflowException, match="after 3 replacements"):
        run_to_end(task, deferrable)
    assert len(task.cluster.runs) == 4


def test_a_submission_that_never_arrived_is_sent_again_under_its_identity() -> None:
    task = FakeTask()
    task.cluster.on_call = crash_at(1)
    with pytest.raises(Crash):
        run_to_end(task, False)
    token = task.record["handle"]["token"]
    assert task.record["phase"] == "minted"
    assert task.cluster.runs == {}
    assert run_to_end(task, False)["token"] == token


def test_a_run_that_started_and_was_lost_before_it_was_noted_is_replaced() -> None:
    task = FakeTask()
    task.cluster.on_call = crash_at(2)  # after submit, before the record says so
    with pytest.raises(Crash):
        run_to_end(task, False)
    task.cluster.files[f"{task.record['handle']['output_uri']}/started-rank0.json"] = "{}"
    task.cluster.lose_everything()
    assert run_to_end(task, False)["generation"] == 2


def test_a_failure_for_good_is_told_by_the_next_try_when_its_judge_did_not_live_to(deferrable: bool) -> None:
    task = FakeTask(cluster=FakeCluster(scripts=[failing("USER", "no rows")]))
    task.store.on_call = lambda verb, moment: crash_at(1)(verb, moment) if _is_closed(task) else None
    with pytest.raises(Crash):
        run_to_end(task, deferrable)
    task.store.on_call = lambda *_: None
    with pytest.raises(AirflowFailException, match="no rows"):
        run_to_end(task, deferrable)
    assert len(task.cluster.runs) == 1, "it would only fail again"
    task.clear()
    run_to_end(task, deferrable)
    assert len(task.cluster.runs) == 2, "a person wants it to"


def _is_closed(task: FakeTask) -> bool:
    return task.record is not None and task.record["phase"] == "closed"
