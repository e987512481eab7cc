# SPDX-License-Identifier: Apache-2.0
"""Watches one run from the triggerer, for as long as it takes, and fires once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from deepspeed_provider.backends.base import Backend, BackendUnavailable, RunHandle, RunState, RunStatus, WithPages
from deepspeed_provider.links import ClusterLogsLink
from deepspeed_provider.runs.bill import Meter
from deepspeed_provider.runs.progress import ProgressLog
from deepspeed_provider.runs.record import Outcome
from deepspeed_provider.runs.tracking import end_run
from deepspeed_provider.triggers.task_states import TERMINAL_TASK_STATES, ask_task_states, state_of, states_query

if TYPE_CHECKING:
    from deepspeed_provider.triggers.workspace_poller import WorkspacePoller

MAX_POLL_ERRORS = 5
JITTER = 0.2

GetTaskStates = Callable[..., Awaitable[Mapping[str, Mapping[str, Any]]]]
SetXCom = Callable[..., Awaitable[None]]
Connect = Callable[[], Awaitable[Backend]]


class DurableRunTrigger(BaseTrigger):
    """Polls a run until it ends, its deadline passes, or it cannot be watched.

    Fires exactly one event: ``{"status": "terminal" | "unseen" | "deadline" | "error", "state": …, "message": …}``;
    a run is unseen when its submission got no answer, and has to be sent again.
    The judgement is the operator's. An unreachable cluster is asked again until the deadline.

    :param handle: ``RunHandle.to_json()``.
    :param spark_connect_conn_id, databricks_conn_id: resolved here, in the event loop, so that no secret is serialised;
        the Databricks workspace where one is named.
    :param task: dag_id, run_id, task_id and map_index of the waiting task.
    :param deadline_s: seconds since the epoch, or None.
    :param poll_interval_s: seconds between two polls, give or take a fifth.
    :param mlflow_run_id, tracking_uri: the MLflow run to end when the run is cancelled here, or None.
    :param usd_per_hour: of the run's cluster, or None.
    """

    def __init__(
        self,
        *,
        handle: Mapping[str, Any],
        spark_connect_conn_id: str,
        task: Mapping[str, Any],
        deadline_s: float | None = None,
        poll_interval_s: float = 10.0,
        mlflow_run_id: str | None = None,
        tracking_uri: str | None = None,
        usd_per_hour: float | None = None,
        databricks_conn_id: str | None = None,
        connect: Connect | None = None,
        poller: WorkspacePoller | None = None,
        get_task_states: GetTaskStates | None = None,
        set_xcom: SetXCom | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handle = dict(handle)
        self.spark_connect_conn_id = spark_connect_conn_id
        self.databricks_conn_id = databricks_conn_id
        self.task_key = dict(task)
        self.deadline_s = deadline_s
        self.poll_interval_s = poll_interval_s
        self.mlflow_run_id = mlflow_run_id
        self.tracking_uri = tracking_uri
        self.usd_per_hour = usd_per_hour
        self._connect = connect or self._connect_by_hook
        self._poller = poller
        self._get_task_states = get_task_states or _task_states
        self._set_xcom = set_xcom or _set_xcom
        self._sleep = sleep
        self._clock = clock
        self._jitter = jitter
        self._ended = False
        self._told_logs = False
        meter = Meter(usd_per_hour=usd_per_hour, clock=clock, log=self.log)
        self._progress = ProgressLog(meter=meter, log=self.log)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "deepspeed_provider.triggers.run.DurableRunTrigger",
            {
                "handle": self.handle,
                "spark_connect_conn_id": self.spark_connect_conn_id,
                "databricks_conn_id": self.databricks_conn_id,
                "task": self.task_key,
                "deadline_s": self.deadline_s,
                "poll_interval_s": self.poll_interval_s,
                "mlflow_run_id": self.mlflow_run_id,
                "tracking_uri": self.tracking_uri,
                "usd_per_hour": self.usd_per_hour,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        event = await self._watch()
        self._ended = event["status"] == "terminal"
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Cancels the run when the task has ended in a terminal state, and only then."""
        handle = RunHandle.from_json(self.handle)
        if self._ended:
            return
        try:
            state = await self._task_state()
        except Exception as error:  # noqa: BLE001  (not knowing must never cancel a run)
            self.log.error(
                "Run %s is NOT cancelled: the task's state cannot be read (%s). If nobody wants it any more, stop it "
                "on the cluster; its files are in %s.",
                handle.token[:12],
                error,
                handle.output_uri,
            )
            return
        if state not in TERMINAL_TASK_STATES:
            self.log.info("The task is %s: run %s is left to its next attempt.", state, handle.token[:12])
            return
        self.log.info("The task was set to %s: cancelling run %s.", state, handle.token[:12])
        # Together: Airflow bounds this, and a cluster that does not answer must not leave the MLflow run open.
        await asyncio.gather(self._end_tracking(), self._cancel_until_stopped(handle))

    async def cleanup(self) -> None:
        """Runs at every restart of the triggerer, so it leaves the run alone."""

    async def _watch(self) -> dict[str, Any]:
        handle = RunHandle.from_json(self.handle)
        backend: Backend | None = None
        errors = 0
        while True:
            if self.deadline_s is not None and self._clock() >= self.deadline_s:
                return {"status": "deadline", "state": None, "message": "the deadline has passed"}
            try:
                backend = backend or await self._connect()
                status = await self._look(backend, handle)
                if status.state is RunState.UNSEEN:
                    return {"status": "unseen", "state": None, "message": status.detail}
                if status.state.terminal:
                    await self._show_progress(backend, handle)
                    return {"status": "terminal", "state": status.state.value, "message": status.detail}
                errors = 0
                if self._is_my_turn(handle):
                    await self._show_progress(backend, handle)
            except BackendUnavailable as error:
                # A restarted engine has another address, a rotated token another value: connect anew.
                backend = None
                self.log.warning("The cluster does not answer (%s); asking again.", error)
            except Exception as error:  # noqa: BLE001  (one odd answer must not end the watch)
                backend = None
                errors += 1
                self.log.warning("Polling failed (%d of %d): %s", errors, MAX_POLL_ERRORS, error)
                if errors >= MAX_POLL_ERRORS:
                    return {"status": "error", "state": None, "message": f"{type(error).__name__}: {error}"}
            # Who asks for all triggers keeps the time for all.
            if self._poller_of(handle) is None or errors:
                await self._sleep(self._pause_s())

    async def _look(self, backend: Backend, handle: RunHandle) -> RunStatus:
        """The state, at once or when the poller of all triggers asks next."""
        poller = self._poller_of(handle)
        if poller is None:
            return await asyncio.to_thread(backend.poll, handle)
        left_s = float("inf") if self.deadline_s is None else self.deadline_s - self._clock()
        return await poller.status(handle.ids["run_id"], max(0.0, min(self.poll_interval_s, left_s)))

    def _poller_of(self, handle: RunHandle) -> WorkspacePoller | None:
        """Of a run through the Jobs API whose id is known."""
        if not self.databricks_conn_id or not handle.ids.get("run_id", "").isdigit():
            return None
        if self._poller is None:
            # Not needed over Spark Connect.
            from deepspeed_provider.triggers.workspace_poller import shared_poller

            self._poller = shared_poller(self.databricks_conn_id)
        return self._poller

    def _is_my_turn(self, handle: RunHandle) -> bool:
        poller = self._poller_of(handle)
        return poller is None or poller.may_read_progress(handle.ids["run_id"])

    def _pause_s(self) -> float:
        pause_s = self.poll_interval_s * (1 + JITTER * (2 * self._jitter() - 1))
        return pause_s if self.deadline_s is None else max(0.0, min(pause_s, self.deadline_s - self._clock()))

    async def _show_progress(self, backend: Backend, handle: RunHandle) -> None:
        if await asyncio.to_thread(self._progress.tell, lambda: backend, handle):
            await self._tell_logs(backend, handle)

    async def _tell_logs(self, backend: Backend, handle: RunHandle) -> None:
        """Where the cluster's logs are, once, now that something runs on it: no worker is there to tell."""
        if self._told_logs or not isinstance(backend, WithPages):
            return
        try:
            url = (await asyncio.to_thread(backend.pages, handle)).cluster_logs
            if url:
                self._told_logs = True
                self.log.info("%s: %s", ClusterLogsLink.name, url)
                await self._set_xcom(key=ClusterLogsLink().xcom_key, value=url, **self.task_key)
        except Exception as error:  # noqa: BLE001  (links are for people; the run does not depend on them)
            self.log.debug("No link to the cluster's logs: %s", error)

    async def _connect_by_hook(self) -> Backend:
        from deepspeed_provider.hooks.platforms import platform_of

        return await platform_of(self.spark_connect_conn_id, self.databricks_conn_id).aget_backend()

    async def _task_state(self) -> str | None:
        return state_of(await self._get_task_states(**states_query(self.task_key)), self.task_key)

    async def _end_tracking(self) -> None:
        if self.mlflow_run_id and self.tracking_uri:
            killed = (self.tracking_uri, self.mlflow_run_id, Outcome.CANCELLED)
            # A triggerer that was away may come here after the task has succeeded.
            await asyncio.to_thread(end_run, *killed, log=self.log, unless_ended=True)

    async def _cancel_until_stopped(self, handle: RunHandle) -> None:
        """Asks until the cluster says that the run has stopped. Airflow bounds this (``on_kill_timeout``)."""
        asked = False
        while True:
            try:
                backend = await self._connect()
                if not asked:
                    await asyncio.to_thread(backend.cancel, handle)
                    asked = True
                status = await asyncio.to_thread(backend.poll, handle)
                if status.state.terminal or status.state is RunState.UNSEEN:
                    self.log.info("Run %s has stopped: %s.", handle.token[:12], status.state)
                    return
            except Exception as error:  # noqa: BLE001  (it costs money until it stops: keep asking)
                self.log.error(
                    "Run %s is to be cancelled, but the cluster does not do it yet: %s. Its files are in %s.",
                    handle.token[:12],
                    error,
                    handle.output_uri,
                )
            await self._sleep(1.0)


async def _task_states(**query: Any) -> Mapping[str, Mapping[str, Any]]:
    from asgiref.sync import sync_to_async

    return await sync_to_async(ask_task_states)(**query)


async def _set_xcom(**what: Any) -> None:
    from airflow.sdk import BaseXCom

    await BaseXCom.aset(**what)
