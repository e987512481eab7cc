# SPDX-License-Identifier: Apache-2.0
"""A task instance, its state store and an operator on the cluster in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from airflow.sdk.exceptions import TaskDeferred
from deepspeed_provider.backends.base import RunRequest, RunState
from deepspeed_provider.operators.durable import DurableRunOperator
from deepspeed_provider.operators.worker_kill import TaskView
from deepspeed_provider.testing.memory_cluster import FakeBackend, FakeCluster
from deepspeed_provider.testing.run_scripts import Script

SUCCESS = (RunState.PENDING, RunState.RUNNING, RunState.TERMINATING, RunState.SUCCEEDED)


class Crash(BaseException):
    """The process died here: nothing after this instruction happens in it."""


@dataclass
class FakeClock:
    """Time that passes only by sleeping."""

    now_s: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    async def asleep(self, seconds: float) -> None:
        self.now_s += seconds


def cluster_of(*scripts: tuple[RunState, ...], **options: Any) -> FakeCluster:
    """A cluster whose first runs take these states, one at each look; those after them succeed, step by step."""
    first = [Script(states=states) for states in scripts]
    return FakeCluster(scripts=first, default_script=Script(states=SUCCESS), **options)


@dataclass
class FakeStateStore:
    """Airflow's task state store: JSON only, survives tries and clears."""

    values: dict[str, str] = field(default_factory=dict)
    on_call: Callable[[str, str], None] = lambda verb, moment: None

    def get(self, key: str, default: Any = None) -> Any:
        return json.loads(self.values[key]) if key in self.values else default

    def set(self, key: str, value: Any) -> None:
        self.on_call("store", "before")
        text = json.dumps(value)
        assert len(text) < 65_535
        self.values[key] = text
        self.on_call("store", "after")


class FakeTaskOperator(DurableRunOperator):
    """Runs on the cluster in memory; ``payload`` is what would be trained."""

    def __init__(self, *, cluster: FakeCluster, clock: FakeClock, payload: Any = 1, **kwargs: Any) -> None:
        super().__init__(task_id="train", retries=kwargs.pop("retries", 1), **kwargs)
        self.cluster = cluster
        self.clock = clock
        self.sleep = clock.sleep
        self.payload = payload
        self.look: Callable[[], TaskView] = lambda: TaskView(state="running")

    def get_backend(self) -> FakeBackend:
        return FakeBackend(self.cluster)

    def look_at_task(self, context: Any) -> TaskView:
        return self.look()

    def get_base_uri(self) -> str:
        return "mem://runs"

    def get_links(self, record: Any) -> dict[str, str]:
        return {"spark_ui_url": "http://spark.example:4040"}

    def build_request(self, token: str, output_uri: str, mlflow_run_id: str | None) -> RunRequest:
        payload = {"value": self.payload, "token": token, "output_uri": output_uri, "mlflow": mlflow_run_id}
        return RunRequest(entry="m:f", payload=payload, code=(), output_uri=output_uri)

    def build_output(self, record: Any, result: Any) -> Any:
        return {**result, "generation": record.generation}


@dataclass
class FakeTask:
    """One task instance in one dag run, executed again and again as Airflow would."""

    cluster: FakeCluster = field(default_factory=cluster_of)
    clock: FakeClock = field(default_factory=FakeClock)
    store: FakeStateStore = field(default_factory=FakeStateStore)
    options: dict[str, Any] = field(default_factory=dict)
    retries: int = 1
    try_number: int = 0
    max_tries: int = 1
    xcoms: dict[str, Any] = field(default_factory=dict)
    operator: FakeTaskOperator | None = None
    run_id: str = "manual__1"

    @property
    def record(self) -> dict[str, Any] | None:
        return self.store.get("run")

    def context(self) -> Any:
        ti = SimpleNamespace(
            dag_id="dag",
            run_id=self.run_id,
            task_id="train",
            map_index=-1,
            try_number=self.try_number,
            max_tries=self.max_tries,
            xcom_push=lambda key, value: self.xcoms.__setitem__(key, value),
        )
        return {"ti": ti, "task_state_store": self.store}

    def new_operator(self, **options: Any) -> FakeTaskOperator:
        """In a new process."""
        self.operator = FakeTaskOperator(
            cluster=self.cluster, clock=self.clock, retries=self.retries, **{**self.options, **options}
        )
        return self.operator

    def execute(self, **options: Any) -> Any:
        """The next try, as the scheduler starts it."""
        self.try_number += 1
        return self.new_operator(**options).execute(self.context())

    def resume(self, deferred: TaskDeferred, event: dict[str, Any], **options: Any) -> Any:
        """The same try, after its trigger fired."""
        kwargs = {**(deferred.kwargs or {}), "event": event}
        return self.new_operator(**options).resume_execution(deferred.method_name, kwargs, self.context())

    def clear(self) -> None:
        """What Airflow does to a task instance that somebody clears."""
        self.max_tries = self.try_number + self.retries


def crash_at(count: int) -> Callable[[str, str], None]:
    """Dies at the ``count``-th instruction that anything outside the process could see."""
    left = [count]

    def on_call(verb: str, moment: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Crash(f"{moment} {verb}")

    return on_call


TERMINAL = {"status": "terminal", "state": "SUCCEEDED", "message": ""}


def run_to_end(task: FakeTask, deferrable: bool) -> Any:
    """One try, through as many deferrals as it takes."""
    try:
        return task.execute(deferrable=deferrable)
    except TaskDeferred as deferred:
        return resume_to_end(task, deferred)


def resume_to_end(task: FakeTask, deferred: TaskDeferred) -> Any:
    while True:
        try:
            return task.resume(deferred, TERMINAL, deferrable=True)
        except TaskDeferred as again:
            deferred = again


def store_result(task: FakeTask, **fields: Any) -> None:
    handle = (task.record or {}).get("handle")
    if handle:
        result = {"token": handle["token"], "model_uri": "mem://m", **fields}
        task.cluster.files[f"{handle['output_uri']}/result.json"] = json.dumps(result)
