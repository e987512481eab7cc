# SPDX-License-Identifier: Apache-2.0
"""A run of the fake workspace as the Jobs API 2.2 shows it. Shapes: databricks-sdk 0.162, ``service/jobs.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from deepspeed_provider.testing.endings import Ending
from deepspeed_provider.testing.timeline import Attempt, Behaviour, Course, Order, Phase, TaskCourse, TaskOrder, course

TASKS_A_PAGE: Final = 100
# Fields of a submitted task that ``RunTask`` has too.
_ECHOED: Final = (
    "ai_runtime_task",
    "depends_on",
    "environment_key",
    "existing_cluster_id",
    "libraries",
    "max_retries",
    "min_retry_interval_millis",
    "new_cluster",
    "notebook_task",
    "python_wheel_task",
    "retry_on_timeout",
    "run_if",
    "spark_jar_task",
    "spark_python_task",
    "spark_submit_task",
    "sql_task",
    "timeout_seconds",
)
# What of them is ``ClusterSpec``, of a run.
_CLUSTER: Final = ("existing_cluster_id", "libraries", "new_cluster")
# ``RunLifecycleStateV2State`` names one phase otherwise than the deprecated ``RunLifeCycleState``.
_STATUS: Final = {Phase.WAITING_FOR_RETRY: "WAITING"}


@dataclass(kw_only=True)
class Run:
    """One submitted run: what was asked for, and what is scripted for it.

    Attributes:
        body: as it was submitted.
        url: of its page.
        attempt_ids: run ids of the tasks' attempts; the first has one from the start, later ones when they begin.
        cancels: how often somebody asked to cancel it.
        printed: by attempt's run id, what its code printed beside what its ending says.
    """

    run_id: int
    job_id: int
    body: Mapping[str, Any]
    behaviour: Behaviour
    submitted_ms: int
    creator: str
    url: str
    cancelled_ms: int | None = None
    cancels: int = 0
    attempt_ids: dict[tuple[str, int], int] = field(default_factory=dict)
    printed: dict[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.body.get("run_name") or "Untitled")

    @property
    def token(self) -> str | None:
        return self.body.get("idempotency_token") or None

    @property
    def tasks(self) -> list[Mapping[str, Any]]:
        return list(self.body["tasks"])

    def task(self, key: str) -> Mapping[str, Any]:
        return next(task for task in self.tasks if task["task_key"] == key)

    def course(self, now_ms: int) -> Course:
        tasks = tuple(
            TaskOrder(
                key=task["task_key"],
                depends_on=tuple(upstream["task_key"] for upstream in task.get("depends_on") or ()),
                max_retries=task.get("max_retries") or 0,
                retry_interval_ms=task.get("min_retry_interval_millis") or 0,
                retry_on_timeout=bool(task.get("retry_on_timeout")),
                timeout_ms=1000 * (task.get("timeout_seconds") or 0),
            )
            for task in self.tasks
        )
        order = Order(
            submitted_ms=self.submitted_ms,
            tasks=tasks,
            queue_enabled=bool((self.body.get("queue") or {}).get("enabled")),
            timeout_ms=1000 * (self.body.get("timeout_seconds") or 0),
            cancelled_ms=self.cancelled_ms,
        )
        return course(order, self.behaviour, now_ms)

    def cluster_id(self, key: str, number: int) -> str | None:
        """Of the cluster that an attempt runs on; a serverless one has none."""
        task = self.task(key)
        if task.get("new_cluster"):
            return f"0101-000000-{self.attempt_ids[key, number]:08d}"
        return task.get("existing_cluster_id")


def head(run: Run, now_ms: int) -> dict[str, Any]:
    """The run without its tasks, as ``runs/list`` shows it."""
    found = run.course(now_ms)
    first = next((attempt for task in found.tasks for attempt in task.attempts), None)
    queued_until_ms = run.submitted_ms if first is None else min(first.pending_ms, first.ends_ms, now_ms)
    return {
        **_common(run, run.run_id),
        "run_name": run.name,
        "run_page_url": run.url,
        "trigger": "ONE_TIME",
        "start_time": run.submitted_ms,
        "end_time": found.ended_ms or 0,
        "run_duration": (found.ended_ms or now_ms) - run.submitted_ms,
        "queue_duration": queued_until_ms - run.submitted_ms,
        **_states(run, found.phase, found.ending, None),
    }


def tasks(run: Run, now_ms: int) -> list[dict[str, Any]]:
    """All attempts of all tasks. Those that have begun must have run ids."""
    return [
        _task(run, task, attempt, now_ms) for task in run.course(now_ms).tasks for attempt in (task.attempts or (None,))
    ]


def task_run(run: Run, run_id: int, now_ms: int) -> dict[str, Any]:
    """The run of one attempt, which has the shape of a run and not of a task."""
    task, attempt = _begun(run, run_id, now_ms)
    submitted = run.task(task.key)
    return {
        **_common(run, run_id),
        "job_run_id": run.run_id,
        "run_name": task.key,
        "cluster_spec": {name: submitted[name] for name in _CLUSTER if name in submitted},
        **_attempt(run, task, attempt, now_ms),
    }


def output(run: Run, run_id: int, now_ms: int) -> dict[str, Any]:
    """``runs/get-output`` of one task's run."""
    answer: dict[str, Any] = {"metadata": task_run(run, run_id, now_ms)}
    _, attempt = _begun(run, run_id, now_ms)
    if attempt is None or attempt.phase(now_ms) not in (Phase.TERMINATING, Phase.ENDED):
        return answer
    ending = attempt.ending
    logs = "\n".join(filter(None, [ending.logs, run.printed.get(run_id)]))
    found = {"error": ending.error, "error_trace": ending.error_trace, "logs": logs or None}
    return {**answer, **{name: text for name, text in found.items() if text is not None}, "logs_truncated": False}


def _begun(run: Run, run_id: int, now_ms: int) -> tuple[TaskCourse, Attempt | None]:
    key, number = next(at for at, each in run.attempt_ids.items() if each == run_id)
    task = next(task for task in run.course(now_ms).tasks if task.key == key)
    return task, task.attempts[number] if task.attempts else None


def _common(run: Run, run_id: int) -> dict[str, Any]:
    return {
        "job_id": run.job_id,
        "run_id": run_id,
        "number_in_job": run_id,
        "original_attempt_run_id": run_id,
        "creator_user_name": run.creator,
        "run_type": "SUBMIT_RUN",
    }


def _task(run: Run, task: TaskCourse, attempt: Attempt | None, now_ms: int) -> dict[str, Any]:
    submitted = run.task(task.key)
    return {
        "run_id": run.attempt_ids[task.key, 0 if attempt is None else attempt.number],
        "task_key": task.key,
        **{name: submitted[name] for name in _ECHOED if name in submitted},
        **_attempt(run, task, attempt, now_ms),
    }


def _attempt(run: Run, task: TaskCourse, attempt: Attempt | None, now_ms: int) -> dict[str, Any]:
    """What a task and a task's run both have."""
    if attempt is None:
        return {"attempt_number": 0, **_states(run, task.phase, task.ending, task.key)}
    phase = attempt.phase(now_ms)
    cluster_id = run.cluster_id(task.key, attempt.number) if attempt.has_cluster(now_ms) else None
    return {
        "attempt_number": attempt.number,
        "run_page_url": f"{run.url}/run/{run.attempt_ids[task.key, attempt.number]}",
        "start_time": attempt.begins_ms,
        "end_time": attempt.gone_ms if phase is Phase.ENDED else 0,
        "queue_duration": _spent(attempt.begins_ms, min(attempt.pending_ms, attempt.ends_ms), now_ms),
        "setup_duration": _spent(attempt.pending_ms, min(attempt.starts_ms, attempt.ends_ms), now_ms),
        "execution_duration": _spent(attempt.starts_ms, attempt.ends_ms, now_ms),
        "cleanup_duration": _spent(attempt.ends_ms, attempt.gone_ms, now_ms),
        **({"cluster_instance": {"cluster_id": cluster_id}} if cluster_id else {}),
        **_states(run, phase, attempt.ending if phase is Phase.ENDED else None, task.key),
    }


def _states(run: Run, phase: Phase, ending: Ending | None, task_key: str | None) -> dict[str, Any]:
    """Both models; ``task_key``: of a task rather than of the run."""
    if ending is None:
        if phase is Phase.RUNNING:
            old = new = run.behaviour.running_as
        else:
            old, new = phase.value, _STATUS.get(phase, phase.value)
        queued = {"queue_details": {"code": "ACTIVE_RUNS_LIMIT_REACHED", "message": "The workspace is full."}}
        return {
            "state": {"life_cycle_state": old, "state_message": "", "user_cancelled_or_timedout": False},
            "status": {"state": new, **(queued if phase is Phase.QUEUED else {})},
        }
    message = ending.message.replace("{task}", task_key or "")
    state: dict[str, Any] = {
        "life_cycle_state": ending.task_life_cycle_state if task_key else ending.life_cycle_state,
        "state_message": message,
        "user_cancelled_or_timedout": ending.result_state in ("CANCELED", "TIMEDOUT"),
    }
    if ending.result_state:
        state["result_state"] = ending.result_state
    details = {"code": ending.code, "type": ending.type, "message": message}
    return {"state": state, "status": {"state": "TERMINATED", "termination_details": details}}


def _spent(begin_ms: int, end_ms: int, now_ms: int) -> int:
    return max(0, min(end_ms, now_ms) - begin_ms)
