# SPDX-License-Identifier: Apache-2.0
"""Validation of the request and preparation of its data set."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from deepspeed_provider.errors import SpecError
from deepspeed_provider.hooks.spark_connect import SparkConnectHook
from deepspeed_provider.planning import plan
from deepspeed_provider.spec import FineTuneSpec

if TYPE_CHECKING:
    from airflow.sdk import Context

    from deepspeed_provider.backends.spark_connect import SparkConnectBackend

# Airflow kills a worker's task 5 s after asking it to end: interrupted work has most of that to clean up behind
# itself, which is work on the cluster too.
CLEANUP_SECONDS = 3.0
BETWEEN_INTERRUPTS_SECONDS = 0.2
INTERRUPTED = "The worker was told to end: the preparation was interrupted."


class ValidateSpecOperator(BaseOperator):
    """Checks a whole request before anything costs time: every problem of every field, at once.

    Returns the spec as JSON for the tasks after it, and shows the plan with its reasons.

    :param nodes, use_gpu: as for the fine-tune.
    :param other_params: params of the DAG that are no fields of a spec.
    """

    template_fields: Sequence[str] = ("spark_connect_conn_id",)

    def __init__(
        self,
        *,
        spark_connect_conn_id: str = SparkConnectHook.default_conn_name,
        nodes: int = 1,
        use_gpu: bool = False,
        other_params: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spark_connect_conn_id = spark_connect_conn_id
        self.nodes = nodes
        self.use_gpu = use_gpu
        self.other_params = other_params

    def execute(self, context: Context) -> dict[str, Any]:
        try:
            params = {name: value for name, value in context["params"].items() if name not in self.other_params}
            spec = FineTuneSpec.from_params(params)
            hook = SparkConnectHook(self.spark_connect_conn_id)
            hardware = hook.get_hardware(ranks=spec.ranks, nodes=self.nodes, use_gpu=self.use_gpu)
            for reason in plan(spec, hardware).reasons:
                self.log.info("%s", reason)
        except SpecError as error:
            raise AirflowFailException(str(error)) from error
        return spec.to_params()


class PrepareDatasetOperator(BaseOperator):
    """Prepares the spec's data on the cluster: cleaned, de-duplicated, split, written as Parquet.

    Idempotent: an unchanged source gives the folder that is already there. Blocks its worker, as Spark
    does the work in minutes; ending the task interrupts that work. Returns the data set's manifest with
    ``dataset_uri``.

    :param spec: a mapping of ``FineTuneSpec``'s fields.
    :param base_uri: folder for data sets, reachable from the cluster. Default: the connection's.
    :param prompt_column, completion_column, text_column: columns of the user's data; found by their usual names
        when not given.
    :param modules: Python modules whose docstrings make the ``docstrings`` corpus; default: a good dozen.
    """

    template_fields: Sequence[str] = ("spark_connect_conn_id", "base_uri", "spec")

    def __init__(
        self,
        *,
        spec: Mapping[str, Any],
        spark_connect_conn_id: str = SparkConnectHook.default_conn_name,
        base_uri: str | None = None,
        prompt_column: str | None = None,
        completion_column: str | None = None,
        text_column: str | None = None,
        modules: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spec = spec
        self.spark_connect_conn_id = spark_connect_conn_id
        self.base_uri = base_uri
        self.prompt_column = prompt_column
        self.completion_column = completion_column
        self.text_column = text_column
        self.modules = modules
        self._spark: Any = None
        self._killed = False
        # Made with the session: operators are copied, and locks cannot be.
        self._left_session: threading.Event | None = None

    def execute(self, context: Context) -> dict[str, Any]:  # noqa: ARG002
        from deepspeed_provider.training.prepare import DatasetError, PrepareSettings

        try:
            spec = FineTuneSpec.from_params(self.spec)
        except SpecError as error:
            raise AirflowFailException(str(error)) from error
        hook = SparkConnectHook(self.spark_connect_conn_id)
        base_uri = (self.base_uri or hook.get_base_uri()).rstrip("/")
        settings = PrepareSettings(
            source=spec.data,
            output_uri=f"{base_uri}/datasets",
            heldout_fraction=spec.heldout_fraction,
            prompt_column=self.prompt_column,
            completion_column=self.completion_column,
            text_column=self.text_column,
            modules=None if self.modules is None else tuple(self.modules),
            model_ref=spec.model,
            cache_uri=f"{base_uri}/cache",
        )
        try:
            with self._interruptible(hook) as (backend, spark):
                manifest = backend.prepare_dataset(spark, settings)
        except DatasetError as error:
            raise AirflowFailException(str(error)) from error
        uri, rows, fingerprint = (manifest[name] for name in ("dataset_uri", "rows", "fingerprint"))
        self.log.info("Data set %s: %s rows, fingerprint %s", uri, rows, fingerprint)
        return manifest

    def on_kill(self) -> None:
        """Interrupts the Spark work. Called in between any two instructions of the main thread.

        That may be waiting for the cluster and hold locks of the client, so another thread interrupts, and the
        main thread meets a cancelled operation.
        """
        self._killed = True
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
