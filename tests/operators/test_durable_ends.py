# SPDX-License-Identifier: Apache-2.0
"""How a durable run ends otherwise: outages, deadlines, failures, kills, and nobody left to watch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    TaskDeferralError,
    TaskDeferralTimeout,
    TaskDeferred,
)
from deepspeed_provider.backends.base import BackendUnavailable, RunState
from deepspeed_provider.errors import Failure, FailureKind, SpecError
from deepspeed_provider.testing.memory_cluster import FakeCluster
from deepspeed_provider.testing.run_scripts import Script, failure_file

from operators.fake_task import FakeTask, cluster_of, run_to_end, store_result

FOREVER = (RunState.RUNNING,)


def test_an_unreachable_cluster_is_asked_again(deferrable: bool) -> None:
    task = FakeTask(cluster=cluster_of(outage=25))
    assert run_to_end(task, deferrable)["generation"] == 1
    assert len(task.cluster.runs) == 1


def test_an_unreachable_cluster_is_fatal_at_the_deadline() -> None:
    task = FakeTask(cluster=cluster_of(outage=10**6), options={"timeout": timedelta(minutes=5)})
    with pytest.raises(AirflowException, match="does not answer") as caught:
        run_to_end(task, False)
    assert type(caught.value) is AirflowException  # the retry, which finds it, stops it
    assert task.record["phase"] == "minted"


def test_a_run_that_was_unreachable_at_its_deadline_is_stopped_by_the_retry() -> None:
    task = FakeTask(cluster=cluster_of(FOREVER), options={"timeout": timedelta(minutes=5)})

    def no_answer_to_the_first_try(verb: str, moment: str) -> None:
        if task.try_number == 1 and verb == "poll" and moment == "before":
            raise BackendUnavailable("network")

    task.cluster.on_call = no_answer_to_the_first_try
    with pytest.raises(AirflowException, match="may still be alive"):
        task.execute()
    assert task.cluster.alive == 1
    with pytest.raises(AirflowFailException, match="has stopped"):
        task.execute()
    assert (task.cluster.alive, len(task.cluster.runs)) == (0, 1)


def test_clearing_gives_a_live_run_a_new_deadline() -> None:
    task = FakeTask(cluster=cluster_of(FOREVER), options={"timeout": timedelta(minutes=5)})
    with pytest.raises(TaskDeferred):
        task.execute(deferrable=True)
    task.clock.sleep(1000)
    task.clear()
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(deferrable=True)
    assert deferred.value.trigger.deadline_s == task.clock.now_s + 300
    assert task.cluster.cancels == 0


@pytest.mark.parametrize(("times", "fatal"), [(4, False), (5, True)])
def test_an_odd_answer_is_forgiven_until_it_repeats(times: int, fatal: bool) -> None:
    task, left = FakeTask(), [times]

    def odd(verb: str, moment: str) -> None:
        if verb == "poll" and moment == "before" and left[0]:
            left[0] -= 1
            raise PermissionError("token expired")

    task.cluster.on_call = odd
    if fatal:
        with pytest.raises(PermissionError):
            task.execute()
    assert task.execute()["generation"] == 1
    assert len(task.cluster.runs) == 1


def test_the_deadline_cancels_watches_and_fails_without_a_retry(deferrable: bool) -> None:
    task = FakeTask(cluster=cluster_of(FOREVER, stop_polls=3), options={"timeout": timedelta(minutes=5)})
    if deferrable:
        with pytest.raises(TaskDeferred) as deferred:
            task.execute(deferrable=True)
        assert deferred.value.timeout is None
        assert deferred.value.trigger.deadline_s == task.clock.now_s + 300
        task.clock.sleep(301)
        with pytest.raises(AirflowFailException, match="deadline"):
            task.resume(deferred.value, {"status": "deadline", "state": None, "message": ""}, deferrable=True)
    else:
        with pytest.raises(AirflowFailException, match="deadline"):
            task.execute()
    assert task.cluster.cancels == 1
    assert task.cluster.alive == 0
    assert task.record["outcome"] == "overdue"


def test_a_run_that_finishes_while_it_is_stopped_at_the_deadline_is_a_success() -> None:
    task = FakeTask(
        cluster=cluster_of((RunState.RUNNING,) * 8 + (RunState.SUCCEEDED,)),
        options={"timeout": timedelta(minutes=1), "poll_interval": 10.0},
    )
    task.cluster.on_call = lambda verb, moment: store_result(task) if verb == "cancel" and moment == "before" else None
    assert task.execute()["model_uri"] == "mem://m"


def test_a_run_that_does_not_stop_is_said_loudly() -> None:
    cluster = cluster_of(FOREVER, stop_polls=10**6)
    task = FakeTask(cluster=cluster, options={"timeout": timedelta(minutes=1)})
    with pytest.raises(AirflowException, match="did not stop within 120 s"):
        task.execute()
    assert task.record["phase"] == "submitted"


@pytest.mark.parametrize(
    ("files", "exception", "text"),
    [
        pytest.param(
            {1: failure_file(1, "TRANSIENT", 1.0, "gloo: peer closed"), 0: failure_file(0, "USER", 5.0, "bad column")},
            AirflowFailException,
            "USER on rank 0 at step 3: RuntimeError: bad column",
            id="an echo loses against a later real cause",
        ),
        pytest.param(
            {3: failure_file(3, "GPU_OOM", 1.0), 0: failure_file(0, "TRANSIENT", 0.5)},
            AirflowFailException,
            "GPU_OOM on rank 3",
            id="memory wins over collectives",
        ),
        pytest.param(
            {0: failure_file(0, "UNKNOWN", 9.0), 1: failure_file(1, "USER", 2.0)},
            AirflowFailException,
            "USER on rank 1",
            id="the earliest real cause",
        ),
        pytest.param(
            {0: failure_file(0, "TRANSIENT", 9.0), 1: failure_file(1, "TRANSIENT", 2.0)},
            AirflowException,
            "TRANSIENT on rank 1",
            id="transient is retried",
        ),
        pytest.param({}, AirflowException, "the stage failed", id="no file: the operation's error"),
        pytest.param({0: "{half"}, AirflowException, "the stage failed", id="an unreadable file is no evidence"),
    ],
)
def test_a_failure_is_told_with_its_cause(files: Any, exception: type, text: str, deferrable: bool) -> None:
    task = FakeTask(cluster=cluster_of((RunState.RUNNING, RunState.FAILED)))

    def write(verb: str, moment: str) -> None:
        if task.record:
            for rank, content in files.items():
                task.cluster.files[f"{task.record['handle']['output_uri']}/failure-rank{rank}.json"] = content

    task.cluster.on_call = write
    with pytest.raises(AirflowException, match=text) as caught:
        run_to_end(task, deferrable)
    assert type(caught.value) is exception
    assert task.record["handle"]["output_uri"] in str(caught.value)
    assert task.record["outcome"] == "failed"


def test_a_failed_operation_that_was_a_cancellation_is_replaced() -> None:
    cancelled = Failure(kind=FailureKind.CANCELLED, message="cancelled", evidence="operation error")
    cluster = FakeCluster(scripts=[Script(states=(RunState.FAILED,), failure=cancelled)])
    assert run_to_end(FakeTask(cluster=cluster), False)["generation"] == 2


@pytest.mark.parametrize(("policy", "cancels"), [("cancel", 1), ("detach", 0)])
def test_a_worker_told_to_end(policy: str, cancels: int) -> None:
    task = FakeTask(cluster=cluster_of(FOREVER), options={"on_worker_kill": policy})
    sleeps = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        task.clock.now_s += seconds
        if len(sleeps) == 3:
            task.operator.on_kill()

    task.operator = task.new_operator()
    task.operator.sleep = sleep
    task.try_number = 1
    with pytest.raises(AirflowException, match="told to end"):
        task.operator.execute(task.context())
    assert (task.cluster.cancels > 0) == bool(cancels)
    assert task.cluster.alive == 1 - cancels
    assert len(task.cluster.runs) == 1


def test_a_kill_while_submitting_leaves_nothing_alive() -> None:
    task = FakeTask(cluster=cluster_of(FOREVER))
    task.cluster.on_call = lambda verb, moment: (
        task.operator.on_kill() if (verb, moment) == ("submit", "before") else None
    )
    with pytest.raises(AirflowException, match="was cancelled"):
        task.execute()
    assert task.cluster.alive == 0
    assert len(task.cluster.runs) == 1


def test_after_a_kill_the_next_try_replaces_the_cancelled_run() -> None:
    task = FakeTask(cluster=cluster_of(FOREVER))
    task.cluster.on_call = lambda verb, moment: (
        task.operator.on_kill() if (verb, moment) == ("submit", "after") else None
    )
    with pytest.raises(AirflowException):
        task.execute()
    task.cluster.on_call = lambda verb, moment: None
    assert task.execute()["generation"] == 2


@pytest.mark.parametrize(
    ("error", "last_try", "exception", "cancels"),
    [
        pytest.param("Trigger timeout", True, TaskDeferralTimeout, 1, id="time-out, no try left"),
        pytest.param("Trigger failure", True, TaskDeferralError, 1, id="trigger died, no try left"),
        pytest.param("Trigger failure", False, TaskDeferralError, 0, id="trigger died, the next try attaches"),
    ],
)
def test_a_deferral_that_failed(error: str, last_try: bool, exception: type, cancels: int) -> None:
    task = FakeTask(cluster=cluster_of((RunState.RUNNING,) * 5 + (RunState.SUCCEEDED,)))
    with pytest.raises(TaskDeferred):
        task.execute(deferrable=True)
    task.try_number = task.max_tries + 1 if last_try else 1
    with pytest.raises(exception):
        task.new_operator(deferrable=True).resume_execution("__fail__", {"error": error}, task.context())
    assert task.cluster.cancels == cancels
    if not last_try:
        assert run_to_end(task, True)["generation"] == 1
        assert len(task.cluster.runs) == 1


@pytest.mark.parametrize(
    ("last_try", "error", "alive"),
    [
        pytest.param(False, PermissionError("token revoked"), 1, id="the next try attaches"),
        pytest.param(True, PermissionError("token revoked"), 0, id="no try left"),
        pytest.param(False, AirflowFailException("a wrong setting"), 0, id="fails without a retry"),
        pytest.param(False, SpecError([]), 0, id="the request has become wrong"),
    ],
)
def test_an_unexpected_error_leaves_no_run_unwatched(
    last_try: bool, error: Exception, alive: int, deferrable: bool
) -> None:
    """The attempt that finds the run alive cannot go on with it."""
    task = FakeTask(cluster=cluster_of(FOREVER))
    with pytest.raises(TaskDeferred):
        task.execute(deferrable=True)
    operator = task.new_operator(deferrable=deferrable)
    task.try_number = task.max_tries + 1 if last_try else 1

    def build_request(*_: Any) -> Any:
        raise error

    operator.build_request = build_request
    with pytest.raises(AirflowFailException if isinstance(error, SpecError) else type(error)):
        operator.execute(task.context())
    assert task.cluster.alive == alive
    assert task.record["phase"] == ("closed" if alive == 0 else "submitted")


def test_an_error_is_not_hidden_by_a_cluster_that_cannot_be_reached_for_the_cancel() -> None:
    task = FakeTask(cluster=cluster_of(FOREVER), retries=0, max_tries=0)
    with pytest.raises(TaskDeferred):
        task.execute(deferrable=True)
    operator = task.new_operator()
    operator.get_backend = lambda: (_ for _ in ()).throw(RuntimeError("no such connection"))
    with pytest.raises(RuntimeError, match="no such connection"):
        operator.execute(task.context())


def test_a_trigger_that_cannot_watch_is_tried_three_times() -> None:
    task = FakeTask(cluster=cluster_of(FOREVER), retries=0, max_tries=0)
    error = {"status": "error", "state": None, "message": "ImportError: x"}
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(deferrable=True)
    for _ in range(2):
        with pytest.raises(TaskDeferred) as again:
            task.resume(deferred.value, error, deferrable=True)
        deferred = again
    with pytest.raises(AirflowException, match="cannot be watched"):
        task.resume(deferred.value, error, deferrable=True)
    assert task.cluster.alive == 0


def test_the_trigger_gets_every_setting() -> None:
    task = FakeTask(options={"poll_interval": 7.0, "timeout": timedelta(hours=1), "spark_connect_conn_id": "mine"})
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(deferrable=True)
    _, kwargs = deferred.value.trigger.serialize()
    assert kwargs == {
        "handle": task.record["handle"],
        "spark_connect_conn_id": "mine",
        "databricks_conn_id": None,
        "task": {"dag_id": "dag", "run_id": "manual__1", "task_id": "train", "map_index": -1},
        "deadline_s": task.clock.now_s + 3600,
        "poll_interval_s": 7.0,
        "mlflow_run_id": None,
        "tracking_uri": None,
        "usd_per_hour": None,
    }


@pytest.mark.parametrize("option", [{"on_clear": "attahc"}, {"on_worker_kill": "kill"}], ids=str)
def test_a_wrong_policy_is_refused_when_the_dag_is_parsed(option: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="should be"):
        FakeTask().new_operator(**option)
