# SPDX-License-Identifier: Apache-2.0
"""Whoever ends a worker's process decides about its run: a person, a clear, another attempt, an eviction."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowTaskTimeout
from deepspeed_provider.backends.base import RunIdentity, RunState
from deepspeed_provider.operators.worker_kill import (
    KillVerdict,
    OnWorkerKill,
    TaskView,
    WorkerKill,
    judge_kill,
)
from deepspeed_provider.runs.record import OnClear, Outcome
from deepspeed_provider.triggers.task_states import TERMINAL_TASK_STATES

from operators.fake_task import FakeTask, cluster_of

FOREVER = (RunState.RUNNING,)
CANCEL, LEAVE = True, False
RUNNING = TaskView(state="running")
CLEARED = TaskView(state="restarting", superseded=True)


class RecordingTracker:
    """Remembers what ended how."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, Outcome]] = []

    def start(self, identity: RunIdentity) -> tuple[str, str]:
        return f"mlflow-{identity.generation}", "http://mlflow/1"

    def end(self, run_id: str, outcome: Outcome) -> None:
        self.ended.append((run_id, outcome))


@pytest.mark.parametrize("policy", OnWorkerKill)
@pytest.mark.parametrize("on_clear", OnClear)
@pytest.mark.parametrize("superseded", [False, True])
@pytest.mark.parametrize("state", sorted(TERMINAL_TASK_STATES))
def test_a_person_who_marks_the_task_always_cancels(
    state: str, superseded: bool, on_clear: OnClear, policy: OnWorkerKill
) -> None:
    view = TaskView(state=state, superseded=superseded)
    for has_next_try in (False, True):
        verdict = judge_kill(view, on_clear=on_clear, on_worker_kill=policy, has_next_try=has_next_try)
        assert verdict == KillVerdict(cancel=True, reason=f"the task was set to {state}")


@pytest.mark.parametrize(
    ("view", "on_clear", "policy", "has_next_try", "cancel"),
    [
        pytest.param(CLEARED, "attach", "cancel", True, LEAVE, id="cleared"),
        pytest.param(CLEARED, "attach", "cancel", False, LEAVE, id="cleared on its last try"),
        pytest.param(CLEARED, "restart", "detach", True, CANCEL, id="restart"),
        pytest.param(RUNNING, "attach", "cancel", True, CANCEL, id="eviction"),
        pytest.param(RUNNING, "attach", "detach", True, LEAVE, id="eviction, detached"),
        pytest.param(
            TaskView(state="running", superseded=True), "restart", "cancel", True, LEAVE, id="another attempt runs"
        ),
        *[
            pytest.param(TaskView(state=state, superseded=True), "restart", "cancel", False, LEAVE, id=f"state {state}")
            for state in ("up_for_retry", "scheduled", "queued", "deferred", None, "a state of tomorrow")
        ],
        pytest.param(None, "attach", "cancel", True, LEAVE, id="no answer, a try left"),
        pytest.param(None, "attach", "cancel", False, CANCEL, id="no answer, no try left"),
        pytest.param(None, "attach", "detach", False, LEAVE, id="no answer, no try left, detached"),
    ],
)
def test_who_ended_the_worker(
    view: TaskView | None, on_clear: str, policy: str, has_next_try: bool, cancel: bool
) -> None:
    verdict = judge_kill(
        view, on_clear=OnClear(on_clear), on_worker_kill=OnWorkerKill(policy), has_next_try=has_next_try
    )
    assert verdict.cancel is cancel


def make_kill(look: Callable[[], TaskView], stops: list[int], look_bound_s: float = 5.0) -> WorkerKill:
    return WorkerKill(
        look=look,
        judge=lambda view: KillVerdict(cancel=view == RUNNING, reason=str(view)),
        stop=lambda: stops.append(1),
        log=logging.getLogger(__name__),
        look_bound_s=look_bound_s,
    )


def test_a_signal_while_the_supervisor_is_being_asked_does_not_wait_for_itself() -> None:
    """The main thread holds the lock that asking takes, as in the middle of a request to the supervisor."""
    supervisor, stops = threading.Lock(), []

    def look() -> TaskView:
        with supervisor:
            return RUNNING

    kill = make_kill(look, stops)
    before = signal.signal(signal.SIGTERM, lambda *_: kill.start())
    try:
        with supervisor:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert stops == []
        assert kill.wait().cancel
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stops == [1]


def test_a_supervisor_that_never_answers_is_not_waited_for() -> None:
    never, stops = threading.Event(), []

    def look() -> TaskView:
        never.wait()
        return RUNNING

    assert make_kill(look, stops, look_bound_s=0.0).wait().reason == "None"
    never.set()
    assert stops == []


def test_a_look_that_fails_is_no_answer() -> None:
    def look() -> TaskView:
        raise RuntimeError("API_SERVER_ERROR")

    assert make_kill(look, []).wait().reason == "None"


@pytest.fixture
def task() -> Iterator[FakeTask]:
    return FakeTask(cluster=cluster_of(FOREVER))


def kill_while_waiting(task: FakeTask, view: TaskView | None, **options: Any) -> RecordingTracker:
    """One try in blocking mode, whose process is told to end while it sleeps."""
    task.try_number += 1
    operator, tracker = task.new_operator(**options), RecordingTracker()
    operator.get_tracker = lambda _: tracker

    def look() -> TaskView:
        if view is None:
            raise RuntimeError("no server")
        return view

    def sleep(seconds: float) -> None:
        task.clock.now_s += seconds
        if not operator._killed:
            operator.on_kill()

    operator.look, operator.sleep = look, sleep
    with pytest.raises(AirflowException) as caught:
        operator.execute(task.context())
    assert "next try attaches" in str(caught.value) or "was cancelled" in str(caught.value)
    return tracker


def test_clearing_a_running_task_attaches_to_its_run(task: FakeTask) -> None:
    assert kill_while_waiting(task, CLEARED).ended == []
    assert (task.cluster.cancels, task.cluster.alive) == (0, 1)
    task.clear()
    task.cluster.runs[task.record["handle"]["token"]].states = [RunState.RUNNING, RunState.SUCCEEDED]
    assert task.execute()["generation"] == 1
    assert len(task.cluster.runs) == 1


def test_clearing_a_running_task_with_restart_starts_anew(task: FakeTask) -> None:
    task.options = {"on_clear": "restart"}
    kill_while_waiting(task, CLEARED)
    assert task.cluster.alive == 0
    # Whether or not Airflow raised max_tries: it does so only where the executor reports the old process as done.
    assert task.execute()["generation"] == 2
    assert len(task.cluster.runs) == 2


@pytest.mark.parametrize("policy", ["cancel", "detach"])
@pytest.mark.parametrize("state", ["failed", "success"])
def test_marking_a_running_task_cancels_its_run_and_ends_its_tracking(task: FakeTask, state: str, policy: str) -> None:
    tracker = kill_while_waiting(task, TaskView(state=state), on_worker_kill=policy)
    assert set(tracker.ended) == {("mlflow-1", Outcome.CANCELLED)}
    assert (task.cluster.alive, len(task.cluster.runs)) == (0, 1)


def test_an_attempt_that_was_replaced_leaves_the_run_to_the_new_one(task: FakeTask) -> None:
    kill_while_waiting(task, TaskView(state="running", superseded=True))
    assert (task.cluster.cancels, task.cluster.alive) == (0, 1)


@pytest.mark.parametrize(("retries", "alive"), [(1, 1), (0, 0)], ids=["a try is left", "no try is left"])
def test_without_an_answer_the_run_is_left_to_the_next_try_if_there_is_one(
    task: FakeTask, retries: int, alive: int
) -> None:
    task.retries = task.max_tries = retries
    kill_while_waiting(task, None)
    assert task.cluster.alive == alive


@pytest.mark.parametrize("policy", ["cancel", "detach"])
def test_a_task_that_ran_out_of_its_execution_timeout_cancels(task: FakeTask, policy: str) -> None:
    operator, tracker = task.new_operator(on_worker_kill=policy), RecordingTracker()
    operator.get_tracker = lambda _: tracker
    task.try_number = 1

    def out_of_time(seconds: float) -> None:
        operator.sleep = task.clock.sleep
        raise AirflowTaskTimeout

    operator.sleep = out_of_time
    with pytest.raises(AirflowTaskTimeout):
        operator.execute(task.context())
    operator.on_kill()  # as Airflow does then
    assert tracker.ended == [("mlflow-1", Outcome.CANCELLED)]
    assert (task.cluster.alive, len(task.cluster.runs)) == (0, 1)


def test_a_kill_before_anything_was_minted_submits_nothing(task: FakeTask) -> None:
    operator = task.new_operator()
    task.try_number = 1
    operator.on_kill()
    with pytest.raises(AirflowException, match="told to end"):
        operator.execute(task.context())
    assert task.cluster.runs == {}
