# SPDX-License-Identifier: Apache-2.0
"""Preparation of a data set: in a session of Spark Connect, or as a durable run through the Jobs API."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from deepspeed_provider.backends.base import RunRequest
from deepspeed_provider.errors import FineTuneError, SpecError
from deepspeed_provider.hooks.spark_connect import SparkConnectHook
from deepspeed_provider.links import ClusterLogsLink, DatabricksRunLink
from deepspeed_provider.operators.durable import DurableRunOperator
from deepspeed_provider.operators.record_store import TaskStateRecordStore
from deepspeed_provider.runs.tracking import NoTracker
from deepspeed_provider.spec import FineTuneSpec

if TYPE_CHECKING:
    from airflow.sdk import Context

    from deepspeed_provider.backends.jobs_body import JobSettings
    from deepspeed_provider.backends.spark_connect import SparkConnectBackend
    from deepspeed_provider.runs.job import Job, Tracker
    from deepspeed_provider.runs.record import RunRecord
    from deepspeed_provider.training.prepare import PrepareSettings

ENTRY = "deepspeed_provider.training.prepare:main"
# Beside the record of the run in the task state store.
CLUSTER_KEY = "cluster"
# Airflow kills a worker's task 5 s after asking it to end: interrupted work has most of that to clean up behind
# itself, which is work on the cluster too.
CLEANUP_SECONDS = 3.0
BETWEEN_INTERRUPTS_SECONDS = 0.2
INTERRUPTED = "The worker was told to end: the preparation was interrupted."


class PrepareDatasetOperator(DurableRunOperator):
    """Prepares the spec's data on the cluster: cleaned, de-duplicated, split, written as Parquet.

    Idempotent: an unchanged source gives the folder that is already there. Returns the data set's manifest with
    ``dataset_uri``.

    Over Spark Connect it blocks its worker, as Spark does the work in minutes, and ending the task interrupts that
    work. Through the Jobs API (``databricks_conn_id``) it is a durable run as a fine-tune is, in the driver's own Spark
    session: only there count ``deferrable``, ``timeout`` and what else is said of durable runs. Nothing of either is
    tracked. Where ``job`` names neither an ``existing_cluster_id`` nor a ``cluster``, the run gets a machine without
    GPUs: the smallest of the workspace with 4 cores and 16 GB, with its newest runtime for machine learning.

    :param spec: a mapping of ``FineTuneSpec``'s fields.
    :param base_uri: folder for data sets, reachable from the cluster. Default: the connection's.
    :param prompt_column, completion_column, text_column: columns of the user's data; found by their usual names
        when not given.
    :param modules: Python modules whose docstrings make the ``docstrings`` corpus; default: a good dozen.
    """

    operator_extra_links = (DatabricksRunLink(), ClusterLogsLink())
    template_fields: Sequence[str] = (*DurableRunOperator.template_fields, "spec")

    def __init__(
        self,
        *,
        spec: Mapping[str, Any],
        prompt_column: str | None = None,
        completion_column: str | None = None,
        text_column: str | None = None,
        modules: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spec = spec
        self.prompt_column = prompt_column
        self.completion_column = completion_column
        self.text_column = text_column
        self.modules = modules
        self._job_settings: JobSettings | None = None
        self._spark: Any = None
        # Made with the session: operators are copied, and locks cannot be.
        self._left_session: threading.Event | None = None

    def execute(self, context: Context) -> Any:
        from deepspeed_provider.training.prepare import DatasetError

        try:
            self.read_templates()
            if self.databricks_conn_id:
                return super().execute(context)
            settings = self.get_settings()
        except SpecError as error:
            raise AirflowFailException(str(error)) from error
        try:
            with self._interruptible(SparkConnectHook(self.spark_connect_conn_id)) as (backend, spark):
                manifest = backend.prepare_dataset(spark, settings)
        except DatasetError as error:
            raise AirflowFailException(str(error)) from error
        except FineTuneError as error:
            # A server that cannot be used will not be another one in a minute.
            raise (AirflowException if error.failure.kind.retryable else AirflowFailException)(str(error)) from error
        return self._told(manifest)

    def get_settings(self) -> PrepareSettings:
        """What is prepared, and where. Raises :class:`SpecError`."""
        from deepspeed_provider.training.prepare import PrepareSettings

        spec, base_uri = FineTuneSpec.from_params(self.spec), self.get_base_uri()
        return PrepareSettings(
            source=spec.data,
            output_uri=f"{base_uri}/datasets",
            heldout_fraction=spec.heldout_fraction,
            prompt_column=self.prompt_column,
            completion_column=self.completion_column,
            text_column=self.text_column,
            modules=None if self.modules is None else tuple(self.modules),
            model_ref=spec.model,
            model_revision=spec.model_revision,
            cache_uri=f"{base_uri}/cache",
        )

    def build_request(self, token: str, output_uri: str, mlflow_run_id: str | None) -> RunRequest:  # noqa: ARG002
        return RunRequest(
            entry=ENTRY,
            payload={"settings": asdict(self.get_settings()), "output_uri": output_uri},
            # What prepares travels with every run.
            code=(),
            output_uri=output_uri,
            on_driver=True,
            use_gpu=False,
        )

    def build_output(self, record: RunRecord, result: Any) -> dict[str, Any]:  # noqa: ARG002
        return self._told(result)

    def get_tracker(self, context: Context) -> Tracker:  # noqa: ARG002
        return NoTracker()

    def get_job_settings(self) -> JobSettings:
        return self._job_settings or super().get_job_settings()

    def _job(self, context: Context) -> Job:
        from deepspeed_provider.operators.planned_cluster import own_cluster

        # Before anything is minted: what cannot run leaves no trace.
        settings = super().get_job_settings()
        if own_cluster(self.job) is None:
            settings = replace(settings, cluster=self._small_cluster(context))
        self._job_settings = settings
        return super()._job(context)

    def _small_cluster(self, context: Context) -> Mapping[str, Any]:
        """That of the run that is alive, or was to be submitted; else one of what the workspace has now."""
        from deepspeed_provider.clusters.cluster_body import RunIdentity
        from deepspeed_provider.clusters.cpu_cluster import cpu_cluster
        from deepspeed_provider.operators.plan import offers_in_task

        store, record = context["task_state_store"], TaskStateRecordStore(context).load()
        kept: Any = store.get(CLUSTER_KEY)
        if kept is not None and record is not None and record.outcome is None:
            return dict(kept)
        ti = context["ti"]
        run = RunIdentity(dag_id=ti.dag_id, run_id=ti.run_id, task_id=ti.task_id)
        found = cpu_cluster(offers_in_task(self.databricks_conn_id or ""), run)
        self.log.info("The run gets a %s with %s.", found["node_type_id"], found["spark_version"])
        store.set(CLUSTER_KEY, found)
        return found

    def _told(self, manifest: dict[str, Any]) -> dict[str, Any]:
        uri, rows, fingerprint = (manifest[name] for name in ("dataset_uri", "rows", "fingerprint"))
        self.log.info("Data set %s: %s rows, fingerprint %s", uri, rows, fingerprint)
        return manifest

    def on_kill(self) -> None:
        """Interrupts the Spark work. Called in between any two instructions of the main thread.

        That may be waiting for the cluster and hold locks of the client, so another thread interrupts, and the
        main thread meets a cancelled operation. Through the Jobs API it is as for every durable run.
        """
        super().on_kill()
        if self._spark is not None:
            interrupted = (self._spark, self._left_session)
            threading.Thread(target=self._interrupt, args=interrupted, name="interrupt", daemon=True).start()

    @contextmanager
    def _interruptible(self, hook: SparkConnectHook) -> Iterator[tuple[SparkConnectBackend, Any]]:
        """The cluster, and a session whose work ``on_kill`` interrupts."""
        self._left_session = left_session = threading.Event()
        try:
            backend = hook.get_backend()
            with backend.session() as spark:
                self._spark = spark
                if self._killed:
                    raise AirflowException(INTERRUPTED)
                yield backend, spark
        except AirflowException:
            raise
        except Exception as error:
            if self._killed:
                raise AirflowException(INTERRUPTED) from error
            raise
        finally:
            left_session.set()

    def _interrupt(self, spark: Any, left_session: threading.Event) -> None:
        """Until the main thread has left the session: it may be in between two operations."""
        pause_s = 0.0
        while not left_session.wait(pause_s):
            try:
                pause_s = CLEANUP_SECONDS if spark.interruptAll() else BETWEEN_INTERRUPTS_SECONDS
            except Exception as error:  # noqa: BLE001  (the session may be closing; otherwise ask again)
                self.log.debug("The Spark work cannot be interrupted: %s", error)
                pause_s = BETWEEN_INTERRUPTS_SECONDS
