# SPDX-License-Identifier: Apache-2.0
"""The clusters that the fake workspace makes for runs. Shapes: databricks-sdk 0.162, ``service/compute.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from deepspeed_provider.testing.run_json import Run
from deepspeed_provider.testing.timeline import Attempt, Phase

# A cluster's state while the attempt that it was made for is in a phase.
STATES: Final[Mapping[Phase, str]] = {
    Phase.PENDING: "PENDING",
    Phase.RUNNING: "RUNNING",
    Phase.TERMINATING: "TERMINATING",
    Phase.ENDED: "TERMINATED",
}
# databricks/cli testserver: not shown by ``clusters/get``.
_NOT_ECHOED: Final = ("apply_policy_default_values",)


def attempts_by_cluster(runs: Iterable[Run], now_ms: int) -> dict[str, tuple[Run, str, Attempt]]:
    """Every cluster that was made for a run, with the run, the task's key and the attempt."""
    return {
        cluster_id: (run, task.key, attempt)
        for run in runs
        for task in run.course(now_ms).tasks
        for attempt in task.attempts
        if attempt.has_cluster(now_ms) and (cluster_id := run.cluster_id(task.key, attempt.number))
    }


def existing(cluster_id: str, creator: str) -> dict[str, Any]:
    """``clusters/get`` of one that somebody keeps running, whatever runs on it."""
    return {
        "cluster_id": cluster_id,
        "cluster_name": cluster_id,
        "cluster_source": "UI",
        "creator_user_name": creator,
        "state": "RUNNING",
        "state_message": "",
    }


def cluster(cluster_id: str, run: Run, task_key: str, attempt: Attempt, now_ms: int) -> dict[str, Any]:
    """``clusters/get``."""
    phase = attempt.phase(now_ms)
    answer: dict[str, Any] = {
        "data_security_mode": "SINGLE_USER",  # the default of a job's cluster (databricks/cli testserver)
        **{name: value for name, value in run.task(task_key)["new_cluster"].items() if name not in _NOT_ECHOED},
        "cluster_id": cluster_id,
        "cluster_name": f"job-{run.job_id}-run-{run.run_id}",
        "cluster_source": "JOB",
        "creator_user_name": run.creator,
        "start_time": attempt.pending_ms,
        "state": STATES[phase],
        "state_message": "",
    }
    if phase in (Phase.TERMINATING, Phase.ENDED):
        reason = attempt.ending.cluster
        parameters = dict(reason.parameters)
        answer["termination_reason"] = {"code": reason.code, "type": reason.type, "parameters": parameters}
        answer["state_message"] = attempt.ending.message
    if phase is Phase.ENDED:
        answer["terminated_time"] = attempt.gone_ms
    return answer


def events(cluster_id: str, attempt: Attempt, now_ms: int) -> list[dict[str, Any]]:
    """All of ``clusters/events`` so far, the oldest first."""
    reason = {"code": attempt.ending.cluster.code, "type": attempt.ending.cluster.type}
    came_up = attempt.ends_ms > attempt.starts_ms
    planned: list[tuple[int, str, Mapping[str, Any]]] = [(attempt.pending_ms, "CREATING", {})]
    if came_up:
        planned.append((attempt.starts_ms, "RUNNING", {}))
    planned += [(attempt.ends_ms, kind, details) for kind, details in attempt.ending.events]
    planned.append((attempt.ends_ms, "TERMINATING", {"reason": reason}))
    return [
        {"cluster_id": cluster_id, "timestamp": at_ms, "type": kind, "details": dict(details)}
        for at_ms, kind, details in planned
        if at_ms <= now_ms
    ]
