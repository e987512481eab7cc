# SPDX-License-Identifier: Apache-2.0
"""A task of the Databricks provider's own operator, and its trigger, unmodified, in front of a fake workspace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from airflow.providers.databricks.hooks.databricks import DatabricksHook
from airflow.providers.databricks.operators.databricks import DatabricksSubmitRunOperator
from airflow.providers.databricks.triggers.databricks import DatabricksExecutionTrigger
from airflow.sdk.exceptions import TaskDeferred
from deepspeed_provider.testing.timeline import Phase
from deepspeed_provider.testing.workspace import FakeWorkspace
from operators.fake_task import Crash, FakeStateStore

SUBMIT, GET, OUTPUT, CANCEL = (f"jobs/runs/{name}" for name in ("submit", "get", "get-output", "cancel"))
TASK = {
    "spark_python_task": {"python_file": "/Volumes/main/code/train.py", "parameters": ["--epochs", "1"]},
    "new_cluster": {"spark_version": "15.4.x-gpu-ml-scala2.12", "node_type_id": "g5.xlarge", "num_workers": 2},
}


class Pauses(list[float]):
    """Stands in for sleeping, in a thread or awaited: only writes down for how long."""

    def __call__(self, seconds: float) -> Awaitable[None]:
        self.append(seconds)
        return _Passed()


class _Passed:
    def __await__(self) -> Iterator[Any]:
        return iter(())


@dataclass
class DatabricksTask:
    """One task instance in one dag run, executed again and again as Airflow would.

    The operator retries requests by the provider's own policy; only its pauses are written down rather than slept.

    Attributes:
        options: of the operator.
        at_call: what happens in the worker just before its n-th API call, counted from 1 over all tries.
    """

    options: dict[str, Any] = field(default_factory=dict)
    store: FakeStateStore = field(default_factory=FakeStateStore)
    pauses: Pauses = field(default_factory=Pauses)
    at_call: dict[int, Callable[[], None]] = field(default_factory=dict)
    xcoms: dict[str, Any] = field(default_factory=dict)
    operator: DatabricksSubmitRunOperator | None = None
    calls: int = 0

    @property
    def stored_run_id(self) -> int | None:
        return self.store.get("databricks_run_id")

    @property
    def looks_before_second_poll(self) -> int:
        """How often it asks for its run before: for the page; to be deferred, for the job and the state too; a poll."""
        return 4 if self.options.get("deferrable") else 2

    def execute(self) -> None:
        """The next try, in a new process."""
        self.operator = DatabricksSubmitRunOperator(
            task_id="train",
            json={"tasks": [{"task_key": "train", **TASK}]},
            polling_period_seconds=0,
            databricks_retry_args=None if self.options.get("deferrable") else self._retry_args(),
            **self.options,
        )
        self.operator.execute(self._context())

    def defer(self) -> TaskDeferred:
        """The next try of a deferrable operator, up to where its trigger takes over."""
        try:
            self.execute()
        except TaskDeferred as deferred:
            return deferred
        raise AssertionError("the operator did not defer")

    def run_to_end(self) -> None:
        """The next try, deferred or not."""
        try:
            self.execute()
        except TaskDeferred as deferred:
            [event] = watch(in_triggerer(deferred, self.pauses))
            self.resume(event)

    def resume(self, event: dict[str, Any]) -> None:
        """The same try, after its trigger fired."""
        assert self.operator is not None
        self.operator.execute_complete(self._context(), event)

    def terminate(self) -> None:
        """SIGTERM, as the task runner handles it: ``on_kill``, and the process is gone."""
        assert self.operator is not None
        self.operator.on_kill()
        raise Crash

    def _retry_args(self) -> dict[str, Any]:
        return {**DatabricksHook().retry_args, "sleep": self.pauses, "before": self._before_call}

    def _before_call(self, _: object) -> None:
        self.calls += 1
        self.at_call.pop(self.calls, lambda: None)()

    def _context(self) -> Any:
        ti = SimpleNamespace(xcom_push=lambda key, value: self.xcoms.__setitem__(key, value), stats_tags={})
        return {"ti": ti, "task_state_store": self.store}


def die() -> None:
    """SIGKILL, or the node is gone."""
    raise Crash


def in_triggerer(deferred: TaskDeferred, pauses: Pauses) -> DatabricksExecutionTrigger:
    """The trigger as a triggerer makes it, from what was serialized."""
    path, kwargs = deferred.trigger.serialize()
    module, name = path.rsplit(".", 1)
    trigger = getattr(import_module(module), name)(**kwargs)
    trigger.hook.retry_args["sleep"] = pauses
    return trigger


def watch(trigger: DatabricksExecutionTrigger) -> list[dict[str, Any]]:
    """What it fires, in the end."""

    async def collect() -> list[dict[str, Any]]:
        return [event.payload async for event in trigger.run()]

    return asyncio.run(collect())


def phase(workspace: FakeWorkspace, number: int = 0) -> Phase:
    """Where a run stands; ``number`` counts them in the order of their submits, from 0."""
    return workspace.runs[number].course(workspace.clock.now_ms).phase


def submits(workspace: FakeWorkspace) -> int:
    return len(workspace.requests_for(SUBMIT))


def cancels(workspace: FakeWorkspace) -> int:
    return len(workspace.requests_for(CANCEL))


def running(workspace: FakeWorkspace, **course: Any) -> None:
    """Scripts a run that is running as soon as it is submitted, and stays so while a few looks go by."""
    workspace.next_run(start_s=0, **course)


def assert_left_running(workspace: FakeWorkspace) -> None:
    """One run was submitted; nobody stopped it, and it costs on."""
    assert submits(workspace) == len(workspace.runs) == 1
    assert cancels(workspace) == 0
    assert phase(workspace) is Phase.RUNNING
