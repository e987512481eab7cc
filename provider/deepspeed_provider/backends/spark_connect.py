# SPDX-License-Identifier: Apache-2.0
"""Runs over Spark Connect that outlive their submitter.

``DeepspeedTorchDistributor`` builds the barrier stage; we send it as a detached operation under
ids of our own, so that any other process can ask for its state, fetch its result or cancel it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import pickle
import re
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_provider.backends.base import (
    BackendUnavailable,
    RunHandle,
    RunIdentity,
    RunRequest,
    RunState,
    RunStatus,
)
from deepspeed_provider.backends.cluster_texts import NoFreeTaskSlot, read_texts
from deepspeed_provider.backends.connect_wire import CLIENT_TYPE, ConnectWire, WireError
from deepspeed_provider.errors import Failure, FailureKind, FineTuneError
from deepspeed_provider.training.code_archive import build_code_archive, training_code

if TYPE_CHECKING:
    from deepspeed_provider.training.prepare import PrepareSettings

log = logging.getLogger(__name__)

# Spark's names of operation states; a name that is not here is taken as still running.
STATES = {
    "RUNNING": RunState.RUNNING,
    "TERMINATING": RunState.TERMINATING,
    "SUCCEEDED": RunState.SUCCEEDED,
    "FAILED": RunState.FAILED,
    "CANCELLED": RunState.CANCELLED,
}

# (text in the operation's error, kind, what a person should know). First match wins.
# Source: error classes of Spark 4.3 (python/pyspark/errors, core/src/main/resources/error).
ERROR_PATTERNS: tuple[tuple[str, FailureKind, str], ...] = (
    (
        "PYTHON_VERSION_MISMATCH",
        FailureKind.USER,
        "client and cluster run different Python minor versions; run Airflow's workers on the cluster's version",
    ),
    # pyspark's distributor picks a free port seconds before torchrun listens on it.
    ("EADDRINUSE", FailureKind.TRANSIENT, "the port on which the ranks were to meet was taken in the meantime"),
    ("SPARK-24819", FailureKind.CAPACITY, "the cluster has fewer free task slots than the run has ranks"),
    ("OPERATION_CANCELED", FailureKind.CANCELLED, "the operation was cancelled on the server"),
    ("OPERATION_ABANDONED", FailureKind.CANCELLED, "the server gave the operation up because nobody asked for it"),
)

# What _with_code makes of a rank's output; early in the message, since the server cuts it short and
# gives the whole text out only once.
RANK_FAILED = re.compile(r"RuntimeError: rank (\d+) failed: (.*)")

# Reading is bounded: whoever waits for progress meanwhile keeps no run alive and sees no deadline.
READ_TIMEOUT_SECONDS = 20.0

# An operation that is being stopped sends nothing until its processes have gone.
ENDING_TIMEOUT_SECONDS = 2.0


class SparkConnectBackend:
    """The six verbs of ``Backend`` on one Spark Connect server.

    Args:
        url: ``sc://host:port/;key=value``; may carry a token, so it is never logged or stored.
        user_id: the same in every process that asks for a run; sessions belong to a user id.
        read_timeout_seconds: how long ``read_texts`` waits for a task slot.
    """

    name = "spark_connect"

    def __init__(
        self, url: str, user_id: str = "airflow", *, read_timeout_seconds: float = READ_TIMEOUT_SECONDS
    ) -> None:
        self._url = url
        self._user_id = user_id
        self._read_timeout_seconds = read_timeout_seconds
        self._said_no_slot = False

    def __repr__(self) -> str:
        return f"SparkConnectBackend(user_id={self._user_id!r})"

    def mint(self, request: RunRequest, identity: RunIdentity) -> RunHandle:
        ids = {purpose: identity.uuid(purpose.removesuffix("_id")) for purpose in ("session_id", "operation_id")}
        return RunHandle.minted(self.name, request, identity, **ids)

    def submit(self, request: RunRequest, handle: RunHandle) -> RunHandle:
        if request.on_driver:
            raise ValueError("the driver is the server's; work that is not for ranks is done in a session()")
        session_id, operation_id = handle.ids["session_id"], handle.ids["operation_id"]
        with self._wire() as wire:
            if wire.status(session_id, operation_id) is not None:
                return handle
            with self._session(session_id) as spark:
                plan = _detached_plan(spark, request)
                plan.operation_id = operation_id
                plan.tags.extend([CLIENT_TYPE, f"run-{handle.token[:12]}"])
                try:
                    wire.execute(plan)
                except WireError as error:
                    # Both say that this identity already arrived; poll() tells how it went on.
                    if not error.says("OPERATION_ALREADY_EXISTS", "OPERATION_ABANDONED"):
                        raise FineTuneError(judge_error(error.problem.error_class, error.problem.message)) from error
        return handle

    def poll(self, handle: RunHandle) -> RunStatus:
        session_id, operation_id = handle.ids["session_id"], handle.ids["operation_id"]
        with self._wire() as wire:
            state = wire.status(session_id, operation_id)
            if state is None:
                return self._poll_forgotten(wire, handle)
            if state == "TERMINATING":
                return self._poll_ending(wire, handle)
            status = RunStatus(state=STATES.get(state, RunState.RUNNING), detail=state)
            if not status.state.terminal:
                # A failed touch is no news about the run; the state above is.
                with contextlib.suppress(WireError):
                    wire.touch(session_id, operation_id)
            return status

    def result(self, handle: RunHandle) -> Any:
        status = self.poll(handle)
        if status.state is RunState.LOST:
            raise FineTuneError(
                Failure(
                    kind=FailureKind.TRANSIENT,
                    message="the server holds no such run; it was lost with its server",
                    evidence="operation status",
                )
            )
        if not status.state.terminal and status.state is not RunState.TERMINATING:
            raise ValueError(f"run {handle.token[:12]} has no result yet: it is {status.state}")
        session_id, operation_id = handle.ids["session_id"], handle.ids["operation_id"]
        with self._wire() as wire:
            try:
                return _decode(wire.responses(session_id, operation_id))
            except WireError as error:
                message = wire.whole_message(session_id, error.problem)
                raise FineTuneError(judge_error(error.problem.error_class, message)) from error

    def cancel(self, handle: RunHandle) -> None:
        with self._wire() as wire:
            wire.interrupt(handle.ids["session_id"], handle.ids["operation_id"])

    def read_texts(self, uri_pattern: str) -> dict[str, str]:
        # A session of its own, released at the end: reading must not touch the run's session.
        with self._session(str(uuid.uuid4()), release=True) as spark:
            try:
                return read_texts(spark, uri_pattern, timeout_seconds=self._read_timeout_seconds)
            except NoFreeTaskSlot as error:
                log.log(logging.DEBUG if self._said_no_slot else logging.WARNING, "%s", error)
                self._said_no_slot = True
                raise

    @contextlib.contextmanager
    def session(self) -> Iterator[Any]:
        """A Spark Connect session for ordinary DataFrame work, released at the end."""
        with self._session(str(uuid.uuid4()), release=True) as spark:
            yield spark

    def prepare_dataset(self, spark: Any, settings: PrepareSettings) -> dict[str, Any]:
        """Prepares a data set in a session of ``session()``; its manifest, with ``dataset_uri``.

        ``settings.output_uri`` is the folder of all data sets. Equal requests on equal data share one in it; an
        edited source never meets the old one. Raises ``DatasetError``.
        """
        from deepspeed_provider.training.prepare import prepare_shared

        return prepare_shared(spark, settings)

    def _poll_ending(self, wire: ConnectWire, handle: RunHandle) -> RunStatus:
        """Judges an operation that has ended on the server but whose responses nobody has read.

        The server calls it TERMINATING until a client has seen its last response, so the state
        alone never says how it ended; the stream does.
        """
        try:
            for _ in wire.responses(handle.ids["session_id"], handle.ids["operation_id"], ENDING_TIMEOUT_SECONDS):
                continue
        except WireError as error:
            cancelled = error.says("OPERATION_CANCELED", "OPERATION_ABANDONED")
            return RunStatus(
                state=RunState.CANCELLED if cancelled else RunState.FAILED, detail=error.problem.error_class
            )
        except BackendUnavailable:
            return RunStatus(state=RunState.TERMINATING, detail="TERMINATING")
        return RunStatus(state=RunState.SUCCEEDED, detail="result complete")

    def _poll_forgotten(self, wire: ConnectWire, handle: RunHandle) -> RunStatus:
        """Tells an operation that was cancelled or abandoned from one that the server never held."""
        try:
            wire.touch(handle.ids["session_id"], handle.ids["operation_id"])
        except WireError as error:
            if error.says("OPERATION_ABANDONED"):
                return RunStatus(state=RunState.CANCELLED, detail="OPERATION_ABANDONED")
            return RunStatus(state=RunState.LOST, detail=error.problem.error_class or error.problem.message)
        return RunStatus(state=RunState.RUNNING, detail="reattached")

    def _wire(self) -> ConnectWire:
        return ConnectWire(self._url, self._user_id)

    @contextlib.contextmanager
    def _session(self, session_id: str, *, release: bool = False) -> Iterator[Any]:
        from pyspark.errors import PySparkException
        from pyspark.sql.connect.session import SparkSession

        with self._wire() as wire:
            wire.greet(READ_TIMEOUT_SECONDS)
        separator = "" if "/;" in self._url else "/"
        url = f"{self._url}{separator};user_id={self._user_id};session_id={session_id}"
        spark = SparkSession(url)
        # Ending a session cancels what runs in it; the run's own session must outlive us.
        spark.release_session_on_close = release
        try:
            yield spark
        except PySparkException as error:
            if "UNAVAILABLE" in str(error) or "RETRIES_EXCEEDED" in str(error):
                raise BackendUnavailable(str(error)) from error
            raise
        finally:
            spark.stop()


def _detached_plan(spark: Any, request: RunRequest) -> Any:
    """The distributor's barrier stage as an ``ExecutePlanRequest``, not executed."""
    with tempfile.TemporaryDirectory() as folder:
        archive = build_code_archive((*training_code(), *request.code), Path(folder))
        spark.addArtifacts(str(archive), pyfile=True)
    with _active_remote(spark):
        from pyspark.ml.deepspeed.deepspeed_distributor import DeepspeedTorchDistributor

        class DetachedDistributor(DeepspeedTorchDistributor):
            """Builds the same stage as the stock class, but leaves executing it to us."""

            def _run_distributed_training(self, wrapper: Any, train: Any, run_file: Any, _: Any, *args: Any) -> Any:
                self.driver_address = self.spark.conf.get("spark.driver.host", "") or ""
                # No log server: it would have to live in the submitting process, which leaves.
                self.log_streaming_server_port = -1
                task = self._get_spark_task_function(wrapper, train, run_file, None, *args)
                self._check_encryption()
                rows = self.spark.range(start=0, end=self.num_tasks, step=1, numPartitions=self.num_tasks)
                staged = _with_code(task, archive.name, dict(request.environment), request.use_gpu, self.num_tasks)
                return rows.mapInArrow(staged, schema="chunk binary", barrier=True)

        distributor = DetachedDistributor(
            numGpus=request.gpus_per_node,
            nnodes=request.nodes,
            localMode=False,
            useGpu=request.use_gpu,
            deepspeedConfig=dict(request.deepspeed_config or {}),
        )
        rows: Any = distributor.run(_rank_function(request.entry), json.dumps(dict(request.payload)))
    plan = spark.client._execute_plan_request_with_metadata()
    plan.plan.CopyFrom(rows._plan.to_proto(spark.client))
    return plan


@contextlib.contextmanager
def _active_remote(spark: Any) -> Iterator[None]:
    """Makes ``spark`` the active session, as the distributor looks for it."""
    import os

    from pyspark.sql.connect.session import SparkSession

    # Full pyspark asks this variable whether it is a client; pyspark-client always is one.
    before = os.environ.get("SPARK_CONNECT_MODE_ENABLED")
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    SparkSession._set_default_and_active_session(spark)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SPARK_CONNECT_MODE_ENABLED"]


def _rank_function(entry: str) -> Any:
    """The function that each rank runs. A closure, so that it is pickled by value: the cluster need
    not have this module."""

    def run_rank(payload: str) -> str:
        import importlib
        import os

        # Before anything else: this process must not outlive the Spark task that it belongs to.
        importlib.import_module("deepspeed_provider.training.guardian").start(os.environ)
        called: str = importlib.import_module("deepspeed_provider.training.entry").call(entry, payload)
        return called

    return run_rank


def _with_code(task: Any, archive: str, environment: dict[str, str], use_gpu: bool, num_tasks: int) -> Any:
    """Lets the rank processes, children of the Spark worker, import the session's code artifact."""

    def staged_task(batches: Any) -> Any:
        import os
        import sys

        code = [path for path in sys.path if path.rstrip("/").endswith(archive)]
        if not code:
            raise RuntimeError(f"the session's code artifact {archive} did not arrive on this worker")
        settings = dict(environment)
        settings["PYTHONPATH"] = os.pathsep.join([*code, *filter(None, [os.environ.get("PYTHONPATH")])])
        if not use_gpu:
            # One torchrun agent per rank sets no thread count, and ranks would fight for the cores.
            settings.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_tasks)))
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield from task(batches)
        except RuntimeError as error:
            from deepspeed_provider.training.rank_output import retold

            raise retold(error, os.environ.get("RANK")) from None
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    return staged_task


class _PlainUnpickler(pickle.Unpickler):
    """Reads strings and numbers only: a cluster's answer must not run code in an Airflow worker."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a run's result is JSON text, not {module}.{name}")


def _decode(arrow_streams: Iterator[bytes]) -> Any:
    """The JSON value that rank 0 returned, from the result's Arrow batches of ``chunk binary``."""
    import pyarrow as pa

    chunks: list[bytes] = []
    for stream in arrow_streams:
        with pa.ipc.open_stream(stream) as reader:
            chunks.extend(reader.read_all().column("chunk").to_pylist())
    return json.loads(_PlainUnpickler(io.BytesIO(b"".join(chunks))).load())


def judge_error(error_class: str, message: str) -> Failure:
    """A failure from the error of an operation: the weakest evidence, used when ranks left none."""
    for text, kind, meaning in ERROR_PATTERNS:
        if text in message or text in error_class:
            return Failure(kind=kind, message=meaning, evidence="operation error", detail=message[-4000:])
    rank = RANK_FAILED.search(message)
    first = next((line for line in message.splitlines() if line.strip()), "the run failed without a message")
    python_side = "\n".join(line for line in message.splitlines() if not line.startswith("\tat "))
    return Failure(
        kind=FailureKind.UNKNOWN,
        message=(rank.group(2) if rank else first)[:500],
        evidence="operation error",
        rank=int(rank.group(1)) if rank else None,
        detail=python_side[-4000:],
    )
