# SPDX-License-Identifier: Apache-2.0
"""The base of operators whose run outlives workers, triggerers, retries and clears.

Business logic lives in ``runs``; this module translates Airflow to it and back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseOperator, BaseOperatorLink, conf
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowTaskTimeout

from deepspeed_provider.backends.base import Backend, RunRequest, RunState
from deepspeed_provider.backends.jobs_body import JobSettings, job_settings
from deepspeed_provider.errors import Failure, SpecError
from deepspeed_provider.hooks.platforms import Platform, platform_of
from deepspeed_provider.hooks.spark_connect import SparkConnectHook
from deepspeed_provider.links import ClusterLogsLink, DatabricksRunLink, MlflowRunLink, SparkUiLink
from deepspeed_provider.operators import rendered
from deepspeed_provider.operators.addresses import Addresses
from deepspeed_provider.operators.record_store import NoStore, TaskStateRecordStore
from deepspeed_provider.operators.worker_kill import (
    STOP_BOUND_SECONDS,
    KillVerdict,
    OnWorkerKill,
    TaskView,
    WorkerKill,
    judge_kill,
)
from deepspeed_provider.runs.bill import Bill, Meter
from deepspeed_provider.runs.driver import RunDriver
from deepspeed_provider.runs.job import Finished, Job, RunFailed, StillRunning, Tracker
from deepspeed_provider.runs.progress import ProgressLog
from deepspeed_provider.runs.record import OnClear, Outcome, RunRecord
from deepspeed_provider.runs.tracking import MlflowTracker, NoTracker, without_credentials
from deepspeed_provider.triggers.run import DurableRunTrigger
from deepspeed_provider.triggers.task_states import ask_task_states, state_of, states_query, task_key

if TYPE_CHECKING:
    from airflow.sdk import Context

TRACKING_VARIABLE = "MLFLOW_TRACKING_URI"
MAX_TRIGGER_ERRORS = 3


class WorkerEnded(AirflowException):
    """The worker was told to end; what becomes of its run is settled."""


class DurableRunOperator(rendered.KeepsReferences, BaseOperator):
    """Runs one job on the cluster exactly once, whatever happens to Airflow meanwhile.

    A worker killed at any instruction, a retry, a clear, a restarted triggerer: the next attempt finds the
    run and attaches to it. A retry after a failure, and clearing a task that has succeeded, start anew.

    :param spark_connect_conn_id: connection of type ``spark_connect``; the embedded engine where the default one is
        not defined.
    :param databricks_conn_id: instead, Airflow's own connection of type ``databricks``: the run goes through the
        workspace's Jobs API.
    :param job: how a run is submitted there, a mapping or its JSON, by the fields of
        :class:`~deepspeed_provider.backends.jobs_body.JobSettings`: ``cluster`` or ``existing_cluster_id``,
        ``libraries``, ``code_folder`` (default: ``code`` below the base folder), ``queue``, ``run_fields`` (``run_as``,
        ``access_control_list``, ``email_notifications``, ``budget_policy_id``, …), ``task_fields``, ``cluster_fields``.
    :param base_uri: folder under which runs leave their files, reachable from the cluster. Default: the
        connection's; through the Jobs API a folder of a Volume has to be given.
    :param deferrable: wait in the triggerer instead of on a worker.
    :param poll_interval: seconds between two looks at the run.
    :param timeout: after this time the run is cancelled and the task fails, without a retry. Kept by us
        in both modes, since Airflow's ``execution_timeout`` does not run while a task is deferred.
    :param on_clear: what clearing the task does to a run that is alive: ``attach`` to it, since it was paid
        for, or ``restart``: cancel it and start anew.
    :param on_worker_kill: ``cancel`` the run when the worker's process is told to end though Airflow still takes the
        task for running, as when its machine is emptied, or ``detach``: the next try attaches. A task that a
        person marks always cancels, one that is cleared follows ``on_clear``. Where Airflow does not say which
        it was, the run goes on if a next try comes. In deferrable mode no worker is there to be told.
    :param tracking_uri: MLflow server; default: the environment's ``MLFLOW_TRACKING_URI``; neither means
        no tracking.
    :param experiment: MLflow experiment; default: the dag's id.
    """

    # One that leads nowhere is not shown.
    operator_extra_links: Collection[BaseOperatorLink] = (
        MlflowRunLink(),
        SparkUiLink(),
        DatabricksRunLink(),
        ClusterLogsLink(),
    )
    template_fields: Sequence[str] = (
        *("spark_connect_conn_id", "databricks_conn_id", "job", "base_uri", "tracking_uri", "experiment"),
    )

    clock: Callable[[], float] = staticmethod(time.time)
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    def __init__(
        self,
        *,
        spark_connect_conn_id: str = SparkConnectHook.default_conn_name,
        databricks_conn_id: str | None = None,
        job: Mapping[str, Any] | str | None = None,
        base_uri: str | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        poll_interval: float = 10.0,
        timeout: timedelta | None = None,
        on_clear: str = OnClear.ATTACH.value,
        on_worker_kill: str = OnWorkerKill.CANCEL.value,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if on_worker_kill not in list(OnWorkerKill):
            raise ValueError(f"on_worker_kill = {on_worker_kill!r}: should be 'cancel' or 'detach'.")
        if on_clear not in list(OnClear):
            raise ValueError(f"on_clear = {on_clear!r}: should be 'attach' or 'restart'.")
        self.spark_connect_conn_id = spark_connect_conn_id
        self.databricks_conn_id = databricks_conn_id
        self.job: Any = job
        self.base_uri = base_uri
        self.deferrable = deferrable
        self.poll_interval = poll_interval
        self.timeout = timeout
        self.on_clear = on_clear
        self.on_worker_kill = on_worker_kill
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self._backend: Backend | None = None
        self._record: RunRecord | None = None
        self._tracker: Tracker = NoTracker()
        self._meter: Meter | None = None
        self._progress: ProgressLog | None = None
        self._addresses: Addresses | None = None
        self._kill: WorkerKill | None = None
        self._killed = False
        self._timed_out = False

    def build_request(self, token: str, output_uri: str, mlflow_run_id: str | None) -> RunRequest:
        """What to run. With an empty token it is only digested."""
        raise NotImplementedError

    def build_output(self, record: RunRecord, result: Any) -> Any:
        """The task's return value."""
        raise NotImplementedError

    def execute(self, context: Context) -> Any:
        return self._carry_on(context, trigger_errors=0, new_execution=True)

    def resume(self, context: Context, event: dict[str, Any], trigger_errors: int = 0) -> Any:
        """Continues where the trigger ended; the event only says why, the cluster is asked again."""
        if event.get("status") != "error":
            return self._carry_on(context, trigger_errors=0)
        self.log.error("The trigger could not watch the run: %s", event.get("message"))
        if trigger_errors + 1 >= MAX_TRIGGER_ERRORS:
            self._leave_unwatched(context)
            raise AirflowException(f"The run cannot be watched from the triggerer: {event.get('message')}")
        return self._carry_on(context, trigger_errors=trigger_errors + 1)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        if next_method == "__fail__":
            # The trigger is gone, by a time-out of Airflow's or by an error of its own.
            self._leave_unwatched(context)
        return super().resume_execution(next_method, next_kwargs, context)

    def on_kill(self) -> None:
        """Called when the worker's process is told to end, in between any two instructions of the main thread.

        After ``execution_timeout`` Airflow calls it too, then with nothing else to do.
        """
        self._killed = True
        if self._timed_out:
            self._stop_from_worker()
        elif self._kill is not None:
            self._kill.start()

    def get_platform(self) -> Platform:
        """Where the run goes."""
        settings = self.get_job_settings() if self.databricks_conn_id else None
        return platform_of(self.spark_connect_conn_id, self.databricks_conn_id, settings)

    def get_job_settings(self) -> JobSettings:
        """How a run is submitted to a workspace. Raises :class:`SpecError`."""
        return job_settings({"code_folder": f"{self.get_base_uri()}/code", **(self.job or {})})

    def get_backend(self) -> Backend:
        return self.get_platform().get_backend()

    def get_base_uri(self) -> str:
        """Where runs leave their files."""
        place = self.base_uri or platform_of(self.spark_connect_conn_id, self.databricks_conn_id).get_base_uri()
        return place.rstrip("/")

    def get_links(self, record: RunRecord) -> dict[str, str]:
        """Addresses for people, by the XCom that a link reads."""
        return self.get_platform().get_links(self._backend or self.get_backend(), record.handle)

    def get_usd_per_hour(self) -> float | None:
        """What the run's cluster costs, where that is known."""
        return None

    def get_tracking_uri(self) -> str | None:
        """The MLflow server, or None for no tracking."""
        uri = self.tracking_uri or os.environ.get(TRACKING_VARIABLE)
        try:
            return without_credentials(uri) if uri else None
        except ValueError as error:
            raise AirflowFailException(str(error)) from None

    def get_tracker(self, context: Context) -> Tracker:
        """Where the run is tracked."""
        uri = self.get_tracking_uri()
        if uri is None:
            return NoTracker()
        ti = context["ti"]
        return MlflowTracker(
            tracking_uri=uri,
            experiment=self.experiment or ti.dag_id,
            run_name=f"{ti.task_id} {ti.run_id}",
            tags={"airflow.dag_id": ti.dag_id, "airflow.run_id": ti.run_id, "airflow.task_id": ti.task_id},
            log=self.log,  # type: ignore[arg-type]
        )

    def look_at_task(self, context: Context) -> TaskView:
        """What Airflow says about this task now. Blocks; raises where it says nothing."""
        key = task_key(context["ti"])
        state = state_of(ask_task_states(**states_query(key)), key)
        return TaskView(state=state, superseded=TaskStateRecordStore(context).load() is None)

    def _carry_on(self, context: Context, *, trigger_errors: int, new_execution: bool = False) -> Any:
        try:
            return self._work(context, trigger_errors, new_execution)
        except RunFailed as error:
            self._fail(error)
        except StillRunning as error:
            raise AirflowException(str(error)) from error
        except AirflowTaskTimeout:
            self._timed_out = True
            raise
        except Exception as error:
            final = isinstance(error, SpecError | AirflowFailException)
            if not self._killed:
                self._leave_unwatched(context, final=final)
            if isinstance(error, SpecError):
                raise AirflowFailException(str(error)) from error
            raise
        finally:
            if self._killed and self._kill is not None:
                self._kill.wait()

    def read_templates(self) -> None:
        """What templates left as texts becomes what it stands for. Raises :class:`SpecError`."""
        self.databricks_conn_id = rendered.text(self.databricks_conn_id)
        self.base_uri = rendered.text(self.base_uri)
        self.job = rendered.job(self.job)
        if self.job and not self.databricks_conn_id:
            raise rendered.job_without_workspace(self.job)

    def _work(self, context: Context, trigger_errors: int, new_execution: bool) -> Any:
        self.read_templates()
        job, driver = self._job(context), self._make_driver(context)
        self._tracker = job.tracker
        self._meter = Meter(usd_per_hour=self.get_usd_per_hour(), clock=self.clock, log=self.log)
        self._progress = ProgressLog(meter=self._meter, log=self.log)
        self._kill = WorkerKill(
            look=lambda: self.look_at_task(context),
            judge=lambda view: self._judge_kill(view, context),
            stop=self._stop_from_worker,
            log=self.log,
        )
        self._addresses = addresses = Addresses(context["ti"], links=self.get_links, log=self.log)
        self._record = record = driver.open(job, new_execution=new_execution)
        addresses.tell(record)
        while True:
            step = driver.step(job, record)
            self._record = step.record
            addresses.tell(step.record)
            if isinstance(step, Finished):
                addresses.tell_logs(step.record)
                return self._succeed(step)
            record = step.record
            if self.deferrable:
                self._defer(context, job.tracker, record, trigger_errors)
            self._wait(driver, record)

    def _judge_kill(self, view: TaskView | None, context: Context) -> KillVerdict:
        return judge_kill(
            view,
            on_clear=OnClear(self.on_clear),
            on_worker_kill=OnWorkerKill(self.on_worker_kill),
            has_next_try=self._has_next_try(context),
        )

    def _has_next_try(self, context: Context) -> bool:
        ti = context["ti"]
        return bool(self.retries) and ti.try_number <= ti.max_tries

    def _checkpoint(self, record: RunRecord | None) -> None:
        """Called by the driver before each of its actions: after a kill there is none."""
        self._record = record or self._record
        if not self._killed or self._kill is None:
            return
        verdict = self._kill.wait()
        if not verdict.cancel:
            raise WorkerEnded(f"{verdict.reason}: the run goes on, and the next try attaches to it.")
        # Once more: the first request may have come before the cluster held the run.
        self._stop_from_worker()
        raise WorkerEnded(f"{verdict.reason}: the run was cancelled.")

    def _stop_from_worker(self) -> None:
        """Cancels the run without a word to Airflow, whose supervisor may be waiting for us. Never raises."""
        backend, record = self._backend, self._record
        if backend is None or record is None or record.outcome is not None:
            return
        stopper = RunDriver(
            # The backend at hand: finding the connection again would ask Airflow's supervisor.
            connect=lambda: backend,
            store=NoStore(),
            clock=self.clock,
            sleep=self.sleep,
            log=self.log,
            stop_bound_s=STOP_BOUND_SECONDS,
            stop_poll_s=0.5,
        )
        state: RunState | None = None
        try:
            state = stopper.stop(record)
            self.log.info("Run %s has stopped: %s.", record.handle.token[:12], state)
        except Exception as error:  # noqa: BLE001  (the process ends anyway)
            self.log.error("Run %s: %s", record.handle.token[:12], error)
        if record.mlflow_run_id and state is not RunState.SUCCEEDED:
            self._tracker.end(record.mlflow_run_id, Outcome.CANCELLED)

    def _wait(self, driver: RunDriver, record: RunRecord) -> None:
        """Blocking mode: shows progress and sleeps, in slices so that a kill is seen."""
        news = self._progress is not None and self._progress.tell(lambda: driver.backend, record.handle)
        if news and self._addresses is not None:
            self._addresses.tell_logs(record)
        end_s = self.clock() + self.poll_interval
        while (left_s := end_s - self.clock()) > 0 and not self._killed:
            self.sleep(min(1.0, left_s))

    def _defer(self, context: Context, tracker: Tracker, record: RunRecord, trigger_errors: int) -> NoReturn:
        self.defer(
            trigger=DurableRunTrigger(
                handle=record.handle.to_json(),
                spark_connect_conn_id=self.spark_connect_conn_id,
                databricks_conn_id=self.databricks_conn_id,
                task=task_key(context["ti"]),
                deadline_s=record.deadline_s,
                poll_interval_s=self.poll_interval,
                # Of the run that is ours to end; the evaluation's is the fine-tune's.
                mlflow_run_id=record.mlflow_run_id if isinstance(tracker, MlflowTracker) else None,
                tracking_uri=tracker.tracking_uri if isinstance(tracker, MlflowTracker) else None,
                usd_per_hour=self.get_usd_per_hour(),
            ),
            method_name="resume",
            kwargs={"trigger_errors": trigger_errors},
        )

    def _job(self, context: Context) -> Job:
        ti, key = context["ti"], task_key(context["ti"])
        folder = f"{self.get_base_uri()}/{ti.dag_id}/{ti.task_id}"
        timeout_s = None if self.timeout is None else self.timeout.total_seconds()

        def build(token: str, mlflow_run_id: str | None) -> RunRequest:
            request = self.build_request(token, f"{folder}/{token[:16] or 'draft'}", mlflow_run_id)
            return replace(request, name=f"{ti.dag_id} {ti.task_id} {ti.run_id}", timeout_s=timeout_s)

        return Job(
            key="\n".join((ti.dag_id, ti.run_id, ti.task_id, str(key["map_index"]))),
            build=build,
            tracker=self.get_tracker(context),
            timeout_s=timeout_s,
            max_tries=ti.max_tries,
            on_clear=OnClear(self.on_clear),
        )

    def _make_driver(self, context: Context) -> RunDriver:
        return RunDriver(
            connect=self._connect,
            store=TaskStateRecordStore(context),
            clock=self.clock,
            sleep=self.sleep,
            log=self.log,
            checkpoint=self._checkpoint,
        )

    def _connect(self) -> Backend:
        self._backend = self.get_backend()
        return self._backend

    def _succeed(self, step: Finished) -> Any:
        self._record = step.record
        self.log.info("Run %s succeeded.", step.record.handle.token[:12])
        output, bill = self.build_output(step.record, step.result), self._bill(step.record)
        return {**output, **bill.to_json()} if bill is not None and isinstance(output, dict) else output

    def _bill(self, record: RunRecord) -> Bill | None:
        """Of a run that has ended."""
        if self._meter is None or self._backend is None:
            return None
        bill = self._meter.read(self._backend, record.handle)
        if bill is not None:
            self.log.info("Cost of the run: %s.", bill)
        return bill

    def _fail(self, error: RunFailed) -> NoReturn:
        self._record = error.record
        self._bill(error.record)
        if self._addresses is not None:
            self._addresses.tell_logs(error.record)
        message = describe(error.failure, error.record, self._addresses.page if self._addresses else None)
        raise (AirflowException if error.retryable else AirflowFailException)(message) from error

    def _leave_unwatched(self, context: Context, *, final: bool = False) -> None:
        """Nobody watches the run any more: the next try will, or it is stopped where there is none. Never raises.

        Args:
            final: the task fails without a retry.
        """
        try:
            record = TaskStateRecordStore(context).load()
            if record is None or record.outcome is not None:
                return
            if self._has_next_try(context) and not final:
                self.log.warning("Run %s goes on; the next try attaches to it.", record.handle.token[:12])
                return
            self.log.warning("No try is left to watch run %s: cancelling it.", record.handle.token[:12])
            # Only a submission needs these, and they may be what is wrong.
            self.job = None
            with suppress(SpecError):
                self.read_templates()
            self._make_driver(context).abandon(self.get_tracker(context), record)
        except Exception as error:  # noqa: BLE001  (what brought us here is the error to report)
            self.log.error("The run is left unwatched: %s: %s", type(error).__name__, error)


def describe(failure: Failure, record: RunRecord, page: str | None = None) -> str:
    """What a person reads about a failed run: the cause, where it happened, where to look."""
    # A failure that the platform tells of names its page itself.
    links = [f"run page: {page}"] if page and page not in str(failure) else []
    links.append(f"files: {record.handle.output_uri}")
    if record.mlflow_url:
        links.append(f"MLflow run: {record.mlflow_url}")
    return f"{failure}\nRun {record.handle.token[:12]}, generation {record.generation}; {'; '.join(links)}"
