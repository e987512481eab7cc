# SPDX-License-Identifier: Apache-2.0
"""A task instance whose runs go through the Jobs API of a fake workspace, over HTTP and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from airflow.sdk.exceptions import TaskDeferred
from deepspeed_provider.backends.databricks_jobs import DatabricksJobsBackend
from deepspeed_provider.backends.jobs_body import JobSettings
from deepspeed_provider.hooks.databricks import DatabricksWorkspaceHook
from deepspeed_provider.testing.workspace import FakeWorkspace
from deepspeed_provider.triggers.run import DurableRunTrigger
from deepspeed_provider.triggers.workspace_poller import WorkspacePoller

from operators.fake_task import FakeClock, FakeTask, FakeTaskOperator

VOLUME = "/Volumes/main/default/runs"
CLUSTER = {"spark_version": "16.4.x-gpu-ml-scala2.12", "node_type_id": "g5.xlarge", "num_workers": 0}


@dataclass
class WorkspaceClock(FakeClock):
    """Airflow's clock; the workspace's goes along when somebody sleeps."""

    workspace: FakeWorkspace | None = None

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.workspace is not None:
            self.workspace.advance(seconds)

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)


class WatchedWire:
    """A hook whose process may die before or after any request."""

    def __init__(self, hook: DatabricksWorkspaceHook, on_call: Callable[[str, str], None]) -> None:
        self._hook = hook
        self._on_call = on_call

    def __getattr__(self, verb: str) -> Any:
        asked = getattr(self._hook, verb)

        def call(path: str, *arguments: Any) -> Any:
            self._on_call(path, "before")
            answer = asked(path, *arguments)
            self._on_call(path, "after")
            return answer

        return call


class WorkspaceOperator(FakeTaskOperator):
    """The operator as it ships, but for what it runs and for how long its hook sleeps."""

    get_platform = FakeTaskOperator.get_platform

    def __init__(
        self, *, base_uri: str, on_call: Callable[[str, str], None], job_settings: dict[str, Any], **kwargs: Any
    ) -> None:
        super().__init__(base_uri=base_uri, databricks_conn_id="databricks_default", **kwargs)
        self.on_call = on_call
        self.job_settings = job_settings

    def get_backend(self) -> DatabricksJobsBackend:
        hook = DatabricksWorkspaceHook(sleep=self.sleep)
        settings = JobSettings(code_folder=f"{VOLUME}/code", **self.job_settings)
        return DatabricksJobsBackend(WatchedWire(hook, self.on_call), settings)

    def get_base_uri(self) -> str:
        return str(self.base_uri)

    def get_links(self, record: Any) -> dict[str, str]:
        return self.get_platform().get_links(self.get_backend(), record.handle)


@dataclass
class WorkspaceTask(FakeTask):
    """``on_call`` sees every request of the operator's, and of the store's."""

    workspace: FakeWorkspace = field(default_factory=FakeWorkspace)
    base_uri: str = VOLUME
    on_call: Callable[[str, str], None] = lambda *_: None
    job_settings: dict[str, Any] = field(default_factory=lambda: {"cluster": CLUSTER})

    def __post_init__(self) -> None:
        self.clock = WorkspaceClock(workspace=self.workspace)

    def new_operator(self, **options: Any) -> WorkspaceOperator:
        found = WorkspaceOperator(
            cluster=self.cluster,
            clock=self.clock,
            retries=self.retries,
            base_uri=self.base_uri,
            on_call=lambda *call: self.on_call(*call),
            job_settings=self.job_settings,
            **{"poll_interval": 60.0, **self.options, **options},
        )
        self.operator = found
        return found

    def run(self, *, deferrable: bool, **options: Any) -> Any:
        """One try to its end, through the real trigger as often as it defers."""
        try:
            return self.execute(deferrable=deferrable, **options)
        except TaskDeferred as deferred:
            return self.after(deferred, **options)

    def after(self, deferred: TaskDeferred, **options: Any) -> Any:
        """What follows a deferral, to the end of the try."""
        while True:
            event = asyncio.run(self.watched(deferred))
            try:
                return self.resume(deferred, event, deferrable=True, **options)
            except TaskDeferred as again:
                deferred = again

    async def watched(self, deferred: TaskDeferred, **options: Any) -> dict[str, Any]:
        """What the trigger says, as another process builds it from its serialised form."""
        async for event in self.trigger(deferred, **options).run():
            return dict(event.payload)
        raise AssertionError("the trigger ended without an event")

    def trigger(self, deferred: TaskDeferred, **options: Any) -> DurableRunTrigger:
        _, kwargs = deferred.trigger.serialize()
        return DurableRunTrigger(
            **kwargs,
            clock=self.clock,
            sleep=self.clock.asleep,
            connect=self._connect,
            poller=WorkspacePoller(self._hook(attempts=1), sleep=self.clock.asleep, jitter=lambda: 0.0),
            **options,
        )

    async def _connect(self) -> DatabricksJobsBackend:
        return DatabricksJobsBackend(self._hook())

    def _hook(self, **options: Any) -> DatabricksWorkspaceHook:
        return DatabricksWorkspaceHook(sleep=self.clock.sleep, asleep=self.clock.asleep, **options)
