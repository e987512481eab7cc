# SPDX-License-Identifier: Apache-2.0
"""What the Jobs API says about a run, in this provider's terms. Pure.

Names: databricks-sdk 0.162, ``service/jobs.py``. The authors of databricks/cli measured (``libs/testserver``) that
failed user code makes the run INTERNAL_ERROR, so the termination code decides, and not the life cycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from deepspeed_provider.backends.base import RunState, RunStatus
from deepspeed_provider.errors import FailureKind

ENDED_LIFE_CYCLES: Final = ("TERMINATED", "SKIPPED", "INTERNAL_ERROR")
_WAITING: Final = ("BLOCKED", "QUEUED", "PENDING", "WAITING", "WAITING_FOR_RETRY")


@dataclass(frozen=True, kw_only=True)
class Termination:
    """What a termination code means: the kind of failure, and what a person should know."""

    kind: FailureKind
    meaning: str


def _row(kind: FailureKind, meaning: str) -> Termination:
    return Termination(kind=kind, meaning=meaning)


_USER, _TRANSIENT, _CAPACITY = FailureKind.USER, FailureKind.TRANSIENT, FailureKind.CAPACITY
TERMINATIONS: Final[Mapping[str, Termination]] = {
    "BUDGET_POLICY_LIMIT_EXCEEDED": _row(_USER, "the budget policy's limit is reached"),
    "CANCELED": _row(_USER, "Databricks cancelled the run, as after its time limit"),
    "CLOUD_FAILURE": _row(_CAPACITY, "the cloud provider could not give the cluster"),
    "CLUSTER_ERROR": _row(_TRANSIENT, "the cluster failed"),
    "CLUSTER_REQUEST_LIMIT_EXCEEDED": _row(_TRANSIENT, "too many clusters were asked for at once"),
    "CLUSTER_TERMINATED_BY_USER": _row(FailureKind.CANCELLED, "somebody ended the cluster"),
    "DISABLED": _row(_USER, "the run is disabled"),
    "DRIVER_ERROR": _row(FailureKind.HOST_OOM, "the Spark driver is gone; suspected: the host's memory is full"),
    "FEATURE_DISABLED": _row(_USER, "the workspace lacks a feature that the run needs"),
    "INTERNAL_ERROR": _row(_TRANSIENT, "Databricks met an unexpected error"),
    "INVALID_CLUSTER_REQUEST": _row(_USER, "the cluster cannot be made as it was asked for"),
    "INVALID_RUN_CONFIGURATION": _row(_USER, "the run is not configured as it should be"),
    "LIBRARY_INSTALLATION_ERROR": _row(_USER, "a library cannot be installed"),
    "MAX_CONCURRENT_RUNS_EXCEEDED": _row(_TRANSIENT, "too many runs at once"),
    "MAX_JOB_QUEUE_SIZE_EXCEEDED": _row(_TRANSIENT, "the queue is full"),
    "MAX_SPARK_CONTEXTS_EXCEEDED": _row(_TRANSIENT, "the existing cluster has no room for another Spark context"),
    "REPOSITORY_CHECKOUT_FAILED": _row(_TRANSIENT, "the Git repository could not be checked out"),
    "RESOURCE_NOT_FOUND": _row(_USER, "something that the run needs does not exist"),
    "RUN_EXECUTION_ERROR": _row(FailureKind.UNKNOWN, "the training failed"),
    "SKIPPED": _row(_USER, "the run was skipped"),
    "STORAGE_ACCESS_ERROR": _row(_TRANSIENT, "the storage could not be reached"),
    "SUCCESS_WITH_FAILURES": _row(FailureKind.UNKNOWN, "a part of the run failed"),
    "UNAUTHORIZED_ERROR": _row(_USER, "the run's identity lacks a permission"),
    "USER_CANCELED": _row(FailureKind.CANCELLED, "somebody cancelled the run"),
    "WORKSPACE_RUN_LIMIT_EXCEEDED": _row(_TRANSIENT, "the workspace has no room for another run; a queue would wait"),
}
UNKNOWN_TERMINATION: Final = _row(FailureKind.UNKNOWN, "the run ended in a way that is not known here")

# Reasons of a cluster's end that another type, zone, time or kind of price might not have: capacity, quota, throttling.
# (databricks-sdk 0.162, ``service/compute.py``, TerminationReasonCode)
CAPACITY_REASONS: Final = frozenset(
    {
        "ALLOCATION_TIMEOUT",
        "ALLOCATION_TIMEOUT_NODE_DAEMON_NOT_READY",
        "ALLOCATION_TIMEOUT_NO_HEALTHY_AND_WARMED_UP_CLUSTERS",
        "ALLOCATION_TIMEOUT_NO_HEALTHY_CLUSTERS",
        "ALLOCATION_TIMEOUT_NO_MATCHED_CLUSTERS",
        "ALLOCATION_TIMEOUT_NO_READY_CLUSTERS",
        "ALLOCATION_TIMEOUT_NO_UNALLOCATED_CLUSTERS",
        "ALLOCATION_TIMEOUT_NO_WARMED_UP_CLUSTERS",
        "AWS_INSUFFICIENT_FREE_ADDRESSES_IN_SUBNET_FAILURE",
        "AWS_INSUFFICIENT_INSTANCE_CAPACITY_FAILURE",
        "AWS_MAX_SPOT_INSTANCE_COUNT_EXCEEDED_FAILURE",
        "AWS_REQUEST_LIMIT_EXCEEDED",
        "AWS_RESOURCE_QUOTA_EXCEEDED",
        "AWS_UNSUPPORTED_FAILURE",
        "AZURE_OPERATION_NOT_ALLOWED_EXCEPTION",
        "AZURE_QUOTA_EXCEEDED_EXCEPTION",
        "AZURE_RESOURCE_MANAGER_THROTTLING",
        "AZURE_RESOURCE_PROVIDER_THROTTLING",
        "CLOUD_ACCOUNT_POD_QUOTA_EXCEEDED",
        "CLOUD_PROVIDER_INSTANCE_NOT_LAUNCHED",
        "CLOUD_PROVIDER_LAUNCH_FAILURE",
        "CLOUD_PROVIDER_RESOURCE_STOCKOUT",
        "CLOUD_PROVIDER_RESOURCE_STOCKOUT_DUE_TO_MISCONFIG",
        "CLUSTER_OPERATION_THROTTLED",
        "CONTAINER_LAUNCH_FAILURE",
        "GCP_API_RATE_QUOTA_EXCEEDED",
        "GCP_INSUFFICIENT_CAPACITY",
        "GCP_IP_SPACE_EXHAUSTED",
        "GCP_QUOTA_EXCEEDED",
        "GCP_RESOURCE_QUOTA_EXCEEDED",
        "GCP_SUBNET_NOT_READY",
        "INSTANCE_POOL_MAX_CAPACITY_REACHED",
        "INTERNAL_CAPACITY_FAILURE",
        "IN_PENALTY_BOX",
        "IP_EXHAUSTION_FAILURE",
        "K8S_ACTIVE_POD_QUOTA_EXCEEDED",
        "LAZY_ALLOCATION_TIMEOUT",
        "NPIP_TUNNEL_SETUP_FAILURE",
        "NPIP_TUNNEL_TOKEN_FAILURE",
        "RATE_LIMITED",
        "REQUEST_THROTTLED",
        "SPARK_IMAGE_DOWNLOAD_THROTTLED",
        "SPOT_INSTANCE_TERMINATION",
        "STORAGE_DOWNLOAD_FAILURE_THROTTLED",
        "SUBNET_EXHAUSTED_FAILURE",
        "UNEXPECTED_LAUNCH_FAILURE",
        "UNSUPPORTED_INSTANCE_TYPE",
    }
)
HOST_MEMORY_REASONS: Final = ("DRIVER_OUT_OF_MEMORY",)


def status_of(run: Mapping[str, Any]) -> RunStatus:
    """The state in an answer of ``runs/get``. Whatever is not known is still running."""
    state, status = run.get("state") or {}, run.get("status") or {}
    life_cycle, named = str(state.get("life_cycle_state", "")), str(status.get("state", ""))
    if not has_ended(run):
        shown = named or life_cycle or "no state"
        message = state.get("state_message") or (status.get("queue_details") or {}).get("message") or ""
        return RunStatus(state=_alive(shown), detail=f"{shown}: {message}" if message else shown)
    code, message = termination(run)
    detail = f"{code}: {message}" if message else code
    if code == "SUCCESS":
        return RunStatus(state=RunState.SUCCEEDED, detail=detail)
    if code in ("USER_CANCELED", "CLUSTER_TERMINATED_BY_USER"):
        return RunStatus(state=RunState.CANCELLED, detail=detail, by_person=True)
    return RunStatus(state=RunState.FAILED, detail=detail)


def has_ended(run: Mapping[str, Any]) -> bool:
    """Whether the run's state is a last one in either model."""
    ended = (run.get("status") or {}).get("state") == "TERMINATED"
    return ended or (run.get("state") or {}).get("life_cycle_state") in ENDED_LIFE_CYCLES


def termination(run: Mapping[str, Any]) -> tuple[str, str]:
    """(termination code, message) of a run or task run that has ended; told from the older model where it must be."""
    details = (run.get("status") or {}).get("termination_details") or {}
    state = run.get("state") or {}
    message = str(details.get("message") or state.get("state_message") or "")
    if details.get("code"):
        return str(details["code"]), message
    result = str(state.get("result_state") or "")
    older = {"SUCCESS": "SUCCESS", "CANCELED": "USER_CANCELED", "TIMEDOUT": "CANCELED", "FAILED": "RUN_EXECUTION_ERROR"}
    return older.get(result, str(result or state.get("life_cycle_state") or "no code")), message


def latest_attempts(run: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Each task's newest attempt, the earliest end first; the API promises no order."""
    newest: dict[str, Mapping[str, Any]] = {}
    for task in run.get("tasks") or ():
        key = str(task.get("task_key"))
        if key not in newest or task.get("attempt_number", 0) >= newest[key].get("attempt_number", 0):
            newest[key] = task
    yield from sorted(newest.values(), key=lambda task: task.get("end_time") or 2**63)


def _alive(named: str) -> RunState:
    if named in _WAITING:
        return RunState.PENDING
    return RunState.TERMINATING if named == "TERMINATING" else RunState.RUNNING


def billed_seconds(run: Mapping[str, Any], now_ms: float) -> float:
    """How long clusters of the run have been there, the time that they take to start included; a queue costs nothing.

    A cluster that is there anyway counts too: its time is the run's.
    """
    seconds = 0.0
    for task in run.get("tasks") or ():
        if start_ms := task.get("start_time"):
            begun_ms = start_ms + (task.get("queue_duration") or 0)
            seconds += max(0.0, (task.get("end_time") or now_ms) - begun_ms) / 1000
    return seconds
