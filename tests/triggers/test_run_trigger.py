# SPDX-License-Identifier: Apache-2.0
"""The watch in the triggerer: one event, whatever the cluster answers; no cancel but a person's."""

from __future__ import annotations

import asyncio
import json
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from deepspeed_provider.backends.base import RunHandle, RunIdentity, RunRequest, RunState
from deepspeed_provider.runs.tracking import MlflowTracker, mlflow_client
from deepspeed_provider.testing.memory_cluster import FakeBackend, FakeCluster, FakeRun
from deepspeed_provider.testing.run_scripts import Script
from deepspeed_provider.triggers.run import MAX_POLL_ERRORS, DurableRunTrigger
from operators.fake_task import FakeClock

TASK = {"dag_id": "dag", "run_id": "r", "task_id": "train", "map_index": -1}
REQUEST = RunRequest(entry="m:f", payload={}, code=(), output_uri="mem://o")
HANDLE: RunHandle = FakeBackend(FakeCluster()).mint(REQUEST, RunIdentity(key="k", generation=1, digest="d"))


def make_trigger(cluster: FakeCluster, clock: FakeClock | None = None, **options: Any) -> DurableRunTrigger:
    clock = clock or FakeClock()

    async def connect() -> FakeBackend:
        return FakeBackend(cluster)

    return DurableRunTrigger(
        handle=HANDLE.to_json(),
        spark_connect_conn_id="c",
        task=options.pop("task", TASK),
        connect=options.pop("connect", connect),
        clock=clock,
        sleep=clock.asleep,
        jitter=lambda: 0.5,
        **options,
    )


def cluster_with(*script: RunState, **options: Any) -> FakeCluster:
    cluster = FakeCluster(**options)
    cluster.runs[HANDLE.token] = FakeRun(request=REQUEST, script=Script(states=script))
    return cluster


def events(trigger: DurableRunTrigger) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [event.payload async for event in trigger.run()]

    return asyncio.run(collect())


@pytest.mark.parametrize("state", [state for state in RunState if state.terminal])
def test_the_end_fires_once(state: RunState) -> None:
    fired = events(make_trigger(cluster_with(RunState.PENDING, RunState.RUNNING, RunState.TERMINATING, state)))
    assert fired == [{"status": "terminal", "state": state.value, "message": f"fake {state}"}]
    json.dumps(fired)


def test_a_restart_goes_on_from_the_serialised_trigger() -> None:
    trigger = make_trigger(
        FakeCluster(), deadline_s=5.0, poll_interval_s=3.0, mlflow_run_id="m", tracking_uri="http://mlflow"
    )
    path, kwargs = trigger.serialize()
    module, _, name = path.rpartition(".")
    again = getattr(import_module(module), name)(**json.loads(json.dumps(kwargs)))
    assert again.serialize() == (path, kwargs)


def test_an_outage_of_any_length_is_waited_for() -> None:
    assert events(make_trigger(cluster_with(RunState.SUCCEEDED, outage=500)))[0]["status"] == "terminal"


def test_a_new_connection_is_made_after_an_outage() -> None:
    cluster, connections = cluster_with(RunState.SUCCEEDED, outage=3), []

    async def connect() -> FakeBackend:
        connections.append(1)
        return FakeBackend(cluster)

    events(make_trigger(cluster, connect=connect))
    assert len(connections) == 4


def test_the_deadline_fires_on_time_and_cancels_nothing() -> None:
    clock = FakeClock()
    cluster = cluster_with(RunState.RUNNING)
    fired = events(make_trigger(cluster, clock, deadline_s=clock.now_s + 25, poll_interval_s=10.0))
    assert fired[0]["status"] == "deadline"
    assert clock.now_s == 1_000_025.0
    assert cluster.cancels == 0


def test_the_deadline_fires_during_an_outage() -> None:
    clock = FakeClock()
    fired = events(make_trigger(cluster_with(RunState.RUNNING, outage=10**6), clock, deadline_s=clock.now_s + 60))
    assert fired[0]["status"] == "deadline"


def test_odd_answers_are_forgiven_until_they_repeat() -> None:
    cluster = cluster_with(RunState.RUNNING, RunState.SUCCEEDED)
    failures = [MAX_POLL_ERRORS - 1]

    def on_call(verb: str, moment: str) -> None:
        if verb == "poll" and moment == "before" and failures[0]:
            failures[0] -= 1
            raise RuntimeError("odd")

    cluster.on_call = on_call
    assert events(make_trigger(cluster))[0]["status"] == "terminal"
    failures[0] = 10**6
    assert events(make_trigger(cluster)) == [{"status": "error", "state": None, "message": "RuntimeError: odd"}]


def test_progress_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_with(*[RunState.RUNNING] * 6, RunState.SUCCEEDED)
    steps = iter([1, 1, 2, 2, 2, 3, 3])

    def on_call(verb: str, moment: str) -> None:
        if (verb, moment) == ("read_texts", "before"):
            progress = {"phase": "training", "step": next(steps), "total_steps": 3, "loss": 1.5, "learning_rate": 1e-4}
            cluster.files["mem://o/progress.json"] = json.dumps(progress)

    cluster.on_call = on_call
    monkeypatch.setattr(DurableRunTrigger, "log", logging.getLogger("trigger-under-test"))
    with caplog.at_level(logging.INFO, logger="trigger-under-test"):
        events(make_trigger(cluster))
    lines = [record.getMessage() for record in caplog.records if "step" in record.getMessage()]
    assert lines == [f"training, step {step}/3, loss 1.5000, learning rate 0.0001" for step in (1, 2, 3)]


def test_unreadable_progress_does_not_end_the_watch() -> None:
    cluster = cluster_with(RunState.RUNNING, RunState.SUCCEEDED)

    def on_call(verb: str, moment: str) -> None:
        if verb == "read_texts":
            raise RuntimeError("no permission")

    cluster.on_call = on_call
    assert events(make_trigger(cluster))[0]["status"] == "terminal"


@pytest.mark.parametrize(
    ("state", "cancels"),
    [
        ("failed", 1),
        ("success", 1),
        ("skipped", 1),
        ("removed", 1),
        ("upstream_failed", 1),
        ("deferred", 0),
        ("running", 0),
        ("queued", 0),
        ("scheduled", 0),
        ("up_for_retry", 0),
        ("restarting", 0),
        (None, 0),
        ("a state of tomorrow", 0),
    ],
)
@pytest.mark.parametrize("map_index", [-1, 0, 7], ids=["unmapped", "first mapped", "mapped"])
def test_only_a_task_that_has_ended_cancels_its_run(state: str | None, cancels: int, map_index: int) -> None:
    asked = []

    async def get_task_states(**query: Any) -> dict[str, dict[str, Any]]:
        asked.append(query)
        # The execution API's shape: a mapped task is named with its index.
        return {"r": {"train" if map_index < 0 else f"train_{map_index}": state, "other": "failed"}}

    cluster = cluster_with(RunState.RUNNING)
    trigger = make_trigger(cluster, get_task_states=get_task_states, task={**TASK, "map_index": map_index})
    asyncio.run(trigger.on_kill())
    assert cluster.cancels == cancels
    assert cluster.alive == 1 - cancels
    mapped = {} if map_index < 0 else {"map_index": map_index}
    assert asked == [{"dag_id": "dag", "task_ids": ["train"], "run_ids": ["r"], **mapped}]


def test_a_task_that_is_not_found_does_not_cancel() -> None:
    async def get_task_states(**query: Any) -> dict[str, dict[str, Any]]:
        return {}

    cluster = cluster_with(RunState.RUNNING)
    asyncio.run(make_trigger(cluster, get_task_states=get_task_states).on_kill())
    assert cluster.cancels == 0


def test_a_look_up_that_fails_does_not_cancel_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def get_task_states(**query: Any) -> dict[str, dict[str, Any]]:
        raise RuntimeError("no supervisor")

    cluster = cluster_with(RunState.RUNNING)
    trigger = make_trigger(cluster, get_task_states=get_task_states)
    trigger._log = logging.getLogger("trigger-under-test")
    with caplog.at_level(logging.ERROR, logger="trigger-under-test"):
        asyncio.run(trigger.on_kill())
    assert cluster.cancels == 0
    assert "NOT cancelled" in caplog.text
    assert "mem://o" in caplog.text


def test_a_cancel_is_repeated_until_the_run_has_stopped() -> None:
    async def get_task_states(**query: Any) -> dict[str, dict[str, Any]]:
        return {"r": {"train": "failed"}}

    cluster = cluster_with(RunState.RUNNING, outage=3, stop_polls=4)
    asyncio.run(make_trigger(cluster, get_task_states=get_task_states).on_kill())
    assert cluster.alive == 0
    assert cluster.cancels == 1


def make_mlflow_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.chdir(folder)
    uri = f"sqlite:///{folder}/mlflow.db"
    run_id, _ = MlflowTracker(tracking_uri=uri, experiment="e", run_name="n").start(
        RunIdentity(key="k", generation=1, digest="d")
    )
    assert run_id
    return uri, run_id


@pytest.mark.slow
def test_a_kill_by_a_person_ends_the_mlflow_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, run_id = make_mlflow_run(tmp_path, monkeypatch)
    state = ["deferred"]

    async def get_task_states(**query: Any) -> dict[str, dict[str, Any]]:
        return {"r": {"train": state[0]}}

    def status() -> str:
        return str(mlflow_client(uri).get_run(run_id).info.status)

    trigger = make_trigger(
        cluster_with(RunState.RUNNING), get_task_states=get_task_states, tracking_uri=uri, mlflow_run_id=run_id
    )
    asyncio.run(trigger.on_kill())
    assert status() == "RUNNING"
    state[0] = "failed"
    asyncio.run(trigger.on_kill())
    assert status() == "KILLED"
    # A triggerer that was away comes here again when another has finished the run.
    mlflow_client(uri).set_terminated(run_id, status="FINISHED")
    asyncio.run(trigger.on_kill())
    assert status() == "FINISHED"


def test_tracking_that_cannot_be_reached_does_not_hinder_the_cancel() -> None:
    async def get_task_states(**query: Any) -> dict[str, dict[str, Any]]:
        return {"r": {"train": "failed"}}

    cluster = cluster_with(RunState.RUNNING)
    dead = {"tracking_uri": "http://127.0.0.1:1", "mlflow_run_id": "0" * 32}
    asyncio.run(make_trigger(cluster, get_task_states=get_task_states, **dead).on_kill())
    assert cluster.alive == 0


def test_cleanup_leaves_the_run_alone() -> None:
    cluster = cluster_with(RunState.RUNNING)
    asyncio.run(make_trigger(cluster).cleanup())
    assert cluster.calls == []


def test_a_kill_after_the_end_does_nothing() -> None:
    cluster = cluster_with(RunState.SUCCEEDED)
    trigger = make_trigger(cluster)
    events(trigger)
    asyncio.run(trigger.on_kill())
    assert cluster.cancels == 0
