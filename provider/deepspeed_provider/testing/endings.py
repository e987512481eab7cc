# SPDX-License-Identifier: Apache-2.0
"""How a run on the fake workspace can end, in both of the API's state models, with what can be read about it.

Sources: databricks-sdk 0.162 (``service/jobs.py``, ``service/compute.py``) for names and shapes; databricks/cli's
``libs/testserver`` where its comments say that a behaviour was measured on a real workspace ("measured"). What neither
says is marked "assumed".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from deepspeed_provider.testing.clock import START_MS

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class At(StrEnum):
    """The phase that an ending cuts short."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"


@dataclass(frozen=True, kw_only=True)
class ClusterReason:
    """``termination_reason`` of a cluster; its parameters are a free map."""

    code: str
    type: str
    parameters: Mapping[str, str] = field(default_factory=dict)


JOB_FINISHED: Final = ClusterReason(code="JOB_FINISHED", type="SUCCESS")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """One way to end.

    Attributes:
        source: who says that it ends so.
        life_cycle_state, result_state: of the run, in the deprecated model.
        task_life_cycle_state: of the task, which differs for failed user code.
        code, type: ``status.termination_details``.
        message: of the run; ``{task}`` stands for the task's key.
        error, error_trace, logs: what ``get-output`` of the task run gives.
        cluster: why its cluster ended.
        events: of the cluster before that, as (type, details).
        result: what rank 0 would have returned, of a training that this provider started.
        failures: the failure files that its ranks would have written, by rank.
    """

    source: str
    life_cycle_state: str = "TERMINATED"
    result_state: str | None = "SUCCESS"
    task_life_cycle_state: str = "TERMINATED"
    code: str = "SUCCESS"
    type: str = "SUCCESS"
    message: str = ""
    at: At = At.RUNNING
    error: str | None = None
    error_trace: str | None = None
    logs: str = ""
    cluster: ClusterReason = JOB_FINISHED
    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    result: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        return self.result_state in ("SUCCESS", "SUCCESS_WITH_FAILURES")

    @property
    def counts_as_failed(self) -> bool:
        """What ``SubmitTask.max_retries`` retries: a FAILED result or an INTERNAL_ERROR life cycle."""
        return self.result_state == "FAILED" or self.task_life_cycle_state == "INTERNAL_ERROR"


WORKLOAD_FAILED: Final = "Task {task} failed with message: Workload failed, see run output for details."
_BY_PLATFORM: Final = Ending(
    source="databricks/cli testserver",
    life_cycle_state="INTERNAL_ERROR",
    task_life_cycle_state="INTERNAL_ERROR",
    result_state="FAILED",
)


def succeeds(*, logs: str = "", result: Mapping[str, Any] = NOTHING) -> Ending:
    return Ending(source="SDK TerminationCodeCode.SUCCESS", logs=logs, result=result)


def fails(error: str, *, error_trace: str | None = None, logs: str = "", **more: Any) -> Ending:
    """The user's own code raised: the run is INTERNAL_ERROR, its task TERMINATED; only the output has the cause."""
    return Ending(
        source="databricks/cli testserver, measured: life cycle INTERNAL_ERROR at the run, TERMINATED at its task",
        life_cycle_state="INTERNAL_ERROR",
        result_state="FAILED",
        code="RUN_EXECUTION_ERROR",
        type="CLIENT_ERROR",
        message=WORKLOAD_FAILED,
        error=error,
        error_trace=error_trace or f"Traceback (most recent call last):\n{error}",
        logs=logs,
        **more,
    )


def out_of_gpu_memory(*, rank: int = 0, ranks: int = 1, step: int = 1, failure_files: bool = True) -> Ending:
    """One rank finds its GPU full.

    The others time out in a collective ten minutes later, and their lines push the cause out of the error that Spark
    keeps (its last 100 lines).

    Args:
        failure_files: whether the ranks lived to write theirs.
    """
    cause = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "21.99 GiB of which 1.12 GiB is free."
    )
    echo = (
        "[rank{0}]:[E ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=12, OpType=ALLREDUCE) ran for 600000 milliseconds before timing out."
    )
    others = [number for number in range(ranks) if number != rank]
    lines = [f"[rank{rank}]: {cause}", *(echo.format(number) for number in others for _ in range(25))]
    files: dict[int, Mapping[str, Any]] = {rank: _failure(rank, "GPU_OOM", 0.0, cause, step, "OutOfMemoryError")}
    for number in others:
        files[number] = _failure(number, "TRANSIENT", 600.0, echo.format(number), step, "DistBackendError")
    return fails(
        "RuntimeError: Training failed: torchrun exited with code 1; included below: " + lines[-1],
        error_trace="\n".join(lines[-100:]),
        logs="\n".join(lines),
        failures=files if failure_files else {},
    )


def host_killed(*, rank: int = 0) -> Ending:
    """The kernel kills a process for want of host memory; the driver goes with it."""
    return replace(
        _BY_PLATFORM,
        source="SDK TerminationCodeCode.DRIVER_ERROR, ClusterEvent DRIVER_NOT_RESPONDING, "
        "TerminationReasonCode.DRIVER_OUT_OF_MEMORY; their order is assumed",
        code="DRIVER_ERROR",
        type="CLIENT_ERROR",
        message="The run encountered an error while communicating with the Spark Driver.",
        logs=f"[rank{rank}] exits with return code = -9",
        cluster=ClusterReason(code="DRIVER_OUT_OF_MEMORY", type="CLIENT_ERROR"),
        events=(("DRIVER_NOT_RESPONDING", {}),),
    )


def library_failure(library: str = "peft==0.21.0") -> Ending:
    """A library cannot be installed: the task never starts."""
    return replace(
        _BY_PLATFORM,
        source="SDK TerminationCodeCode.LIBRARY_INSTALLATION_ERROR: libraries are installed before the task",
        code="LIBRARY_INSTALLATION_ERROR",
        type="CLIENT_ERROR",
        message=f"Library installation failed for {library}: no matching distribution found.",
        at=At.PENDING,
    )


def stock_out(code: str = "AWS_INSUFFICIENT_INSTANCE_CAPACITY_FAILURE") -> Ending:
    """The cloud has no such machines now."""
    message = "The cloud provider has no capacity for the requested instance type now."
    return replace(
        _BY_PLATFORM,
        source="SDK TerminationCodeCode.CLOUD_FAILURE, TerminationReasonCode; job-level codes do not say which",
        code="CLOUD_FAILURE",
        type="CLOUD_FAILURE",
        message=f"Cluster could not be started: {message}",
        at=At.PENDING,
        cluster=ClusterReason(code=code, type="CLOUD_FAILURE", parameters={"databricks_error_message": message}),
        events=(("ADD_NODES_FAILED", {"reason": {"code": code, "type": "CLOUD_FAILURE"}}),),
    )


def spot_loss() -> Ending:
    """A spot machine is taken away while it trains."""
    code = "SPOT_INSTANCE_TERMINATION"
    return replace(
        _BY_PLATFORM,
        source="SDK TerminationReasonCode.SPOT_INSTANCE_TERMINATION, ClusterEvent NODES_LOST; their order is assumed",
        code="CLUSTER_ERROR",
        type="CLOUD_FAILURE",
        message="The cluster lost a node: spot instance was terminated by the cloud provider.",
        cluster=ClusterReason(code=code, type="CLOUD_FAILURE"),
        events=(("NODES_LOST", {"reason": {"code": code, "type": "CLOUD_FAILURE"}}),),
    )


def cluster_ended_by_somebody() -> Ending:
    """A person ends, or restarts, the cluster on which the run is."""
    return replace(
        _BY_PLATFORM,
        source="SDK docstring of TerminationDetails.code, whose enum lacks CLUSTER_TERMINATED_BY_USER; "
        "TerminationReasonCode.USER_REQUEST; the life cycle is assumed",
        code="CLUSTER_TERMINATED_BY_USER",
        type="CLIENT_ERROR",
        message="The cluster was terminated by a user.",
        cluster=ClusterReason(code="USER_REQUEST", type="SUCCESS", parameters={"username": "somebody@example.com"}),
    )


def internal_error() -> Ending:
    """The platform fails by itself."""
    return replace(
        _BY_PLATFORM,
        source="SDK TerminationCodeCode.INTERNAL_ERROR",
        code="INTERNAL_ERROR",
        type="INTERNAL_ERROR",
        message="The run encountered an unexpected error. Try again.",
    )


def succeeds_with_failures() -> Ending:
    return Ending(
        source="SDK RunResultState.SUCCESS_WITH_FAILURES",
        result_state="SUCCESS_WITH_FAILURES",
        code="SUCCESS_WITH_FAILURES",
        message="The run was completed successfully but some child runs failed.",
    )


# Endings that nobody scripts: a request or the platform brings them about.
USER_CANCELED: Final = Ending(
    source="SDK TerminationCodeCode.USER_CANCELED; its type is assumed",
    result_state="CANCELED",
    code="USER_CANCELED",
    type="CLIENT_ERROR",
    message="Run cancelled.",
)
TIMED_OUT: Final = Ending(
    source="SDK TerminationCodeCode.CANCELED: the maximum run duration was exceeded; its type is assumed",
    result_state="TIMEDOUT",
    code="CANCELED",
    type="CLIENT_ERROR",
    message="Run timed out.",
)
RUN_LIMIT: Final = Ending(
    source="SDK TerminationCodeCode.WORKSPACE_RUN_LIMIT_EXCEEDED: without a queue the run fails at once",
    life_cycle_state="SKIPPED",
    task_life_cycle_state="SKIPPED",
    result_state=None,
    code="WORKSPACE_RUN_LIMIT_EXCEEDED",
    type="CLIENT_ERROR",
    message="The workspace has reached the quota for the maximum number of concurrent active runs.",
)
UPSTREAM_FAILED: Final = Ending(
    source="SDK RunResultState.UPSTREAM_FAILED, RunIf.ALL_SUCCESS, TerminationCodeCode.SKIPPED; its type is assumed",
    result_state="UPSTREAM_FAILED",
    code="SKIPPED",
    type="CLIENT_ERROR",
    message="An upstream task failed.",
)
UPSTREAM_CANCELED: Final = replace(
    UPSTREAM_FAILED,
    source="SDK RunResultState.UPSTREAM_CANCELED, RunIf.ALL_SUCCESS, TerminationCodeCode.SKIPPED; its type is assumed",
    result_state="UPSTREAM_CANCELED",
    message="An upstream task was cancelled.",
)


def after(upstream: Iterable[Ending]) -> Ending | None:
    """How a task ends that never starts since its upstream tasks ended so; None lets it start (RunIf.ALL_SUCCESS)."""
    results = [ending.result_state for ending in upstream if not ending.succeeded]
    if not results:
        return None
    return UPSTREAM_CANCELED if set(results) <= {"CANCELED", "UPSTREAM_CANCELED"} else UPSTREAM_FAILED


def of_tasks(endings: Mapping[str, Ending]) -> Ending:
    """How a run ends whose tasks ended so: a cancel is the run's wherever it met a task, then the first failure."""
    worst = min(endings, key=lambda key: _rank(endings[key]))  # the first of equals
    return replace(endings[worst], message=endings[worst].message.replace("{task}", worst))


def _rank(ending: Ending) -> int:
    if ending.result_state == "CANCELED":
        return 0
    if not ending.succeeded:
        return 1
    return 2 if ending.result_state == "SUCCESS_WITH_FAILURES" else 3


def _failure(rank: int, kind: str, after_s: float, message: str, step: int, name: str) -> Mapping[str, Any]:
    return {
        "rank": rank,
        "kind": kind,
        "time": START_MS / 1000 + after_s,
        "message": message,
        "type": name,
        "step": step,
        "traceback": message,
    }
