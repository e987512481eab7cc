# SPDX-License-Identifier: Apache-2.0
"""A run of the fake workspace as the Jobs API 2.2 shows it. Shapes: databricks-sdk 0.162, ``service/jobs.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from deepspeed_provider.testing.endings import Ending
from deepspeed_provider.testing.timeline import Attempt, Behaviour, Course, Order, Phase, TaskCourse, TaskOrder, course

TASKS_A_PAGE: Final = 100
# Fields of a submitted task that the API echoes.
_ECHOED: Final = (
    "depends_on",
    "existing_cluster_id",
    "libraries",
    "new_cluster",
    "notebook_task",
    "python_wheel_task",
    "run_if",
    "spark_jar_task",
    "spark_python_task",
)
# The deprecated model's names for phases; status.state knows fewer.
_STATUS: Final = {Phase.WAITING_FOR_RETRY: "WAITING"}


@dataclass(kw_only=True)
class Run:
    """One submitted run: what was asked for, and what is scripted for it.

    Attributes:
        body: as it was submitted.
        url: of its page.
        attempt_ids: run ids of the tasks' attempts, given out when an attempt begins.
        cancels: how often somebody asked to cancel it.
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

    @property
    def name(self) -> str:
        return str(self.body.get("run_name") or "Untitled")

    @property
    def token(self) -> str | None:
        return self.body.get("idempotency_token")

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
                max_retries=int(task.get("max_retries") or 0),
                retry_interval_ms=int(task.get("min_retry_interval_millis") or 0),
                timeout_ms=1000 * int(task.get("timeout_seconds") or 0),
            )
            for task in self.tasks
        )
        order = Order(
            submitted_ms=self.submitted_ms,
            tasks=tasks,
            queue_enabled=bool((self.body.get("queue") or {}).get("enabled")),
            timeout_ms=1000 * int(self.body.get("timeout_seconds") or 0),
            cancelled_ms=self.cancelled_ms,
        )
        return course(order, self.behaviour, now_ms)

    def cluster_id(self, key: str, number: int) -> str:
        """Of the cluster that an attempt runs on."""
        given = self.task(key).get("existing_cluster_id")
        return str(given) if given else f"0101-000000-{self.attempt_ids[key, number]:08d}"


def page(run: Run, now_ms: int, *, offset: int = 0) -> dict[str, Any]:
    """``runs/get``: the run with one page of its tasks' attempts. All attempts must have run ids."""
    found = run.course(now_ms)
    entries = [_task(run, task, attempt, now_ms) for task in found.tasks for attempt in (task.attempts or (None,))]
    answer = {**_head(run, found, now_ms), "tasks": entries[offset : offset + TASKS_A_PAGE]}
    if offset + TASKS_A_PAGE < len(entries):
        answer["next_page_token"] = f"tasks-{offset + TASKS_A_PAGE}"
    return answer


def listed(run: Run, now_ms: int, *, expand: bool) -> dict[str, Any]:
    """The run in ``runs/list``."""
    whole = page(run, now_ms)
    more = whole.pop("next_page_token", None)
    if not expand:
        whole.pop("tasks")
    elif more:
        whole["has_more"] = True
    return whole


def output(run: Run, task: TaskCourse, attempt: Attempt, now_ms: int) -> dict[str, Any]:
    """``runs/get-output`` of one task run."""
    answer: dict[str, Any] = {"metadata": _task(run, task, attempt, now_ms)}
    if attempt.phase(now_ms) not in (Phase.TERMINATING, Phase.ENDED):
        return answer
    ending = attempt.ending
    found = {"error": ending.error, "error_trace": ending.error_trace, "logs": ending.logs or None}
    return {**answer, **{name: text for name, text in found.items() if text is not None}, "logs_truncated": False}


def _head(run: Run, found: Course, now_ms: int) -> dict[str, Any]:
    attempts = [attempt for task in found.tasks for attempt in task.attempts]
    return {
        "job_id": run.job_id,
        "run_id": run.run_id,
        "number_in_job": run.run_id,
        "original_attempt_run_id": run.run_id,
        "run_name": run.name,
        "creator_user_name": run.creator,
        "run_page_url": run.url,
        "run_type": "SUBMIT_RUN",
        "format": "MULTI_TASK",
        "start_time": run.submitted_ms,
        "end_time": found.ended_ms or 0,
        "run_duration": (found.ended_ms or now_ms) - run.submitted_ms,
        "queue_duration": max([attempt.pending_ms for attempt in attempts[:1]], default=run.submitted_ms)
        - run.submitted_ms,
        **_states(run, found.phase, found.ending, None),
    }


def _task(run: Run, task: TaskCourse, attempt: Attempt | None, now_ms: int) -> dict[str, Any]:
    submitted = run.task(task.key)
    entry = {name: submitted[name] for name in _ECHOED if name in submitted}
    if attempt is None:
        return {"task_key": task.key, "attempt_number": 0, **entry, **_states(run, task.phase, task.ending, task.key)}
    latest = attempt is task.attempts[-1]
    phase = task.phase if latest and task.phase is not Phase.WAITING_FOR_RETRY else attempt.phase(now_ms)
    if phase is not Phase.QUEUED:
        entry["cluster_instance"] = {"cluster_id": run.cluster_id(task.key, attempt.number)}
    run_id = run.attempt_ids[task.key, attempt.number]
    return {
        "run_id": run_id,
        "task_key": task.key,
        "attempt_number": attempt.number,
        "run_page_url": f"{run.url}/run/{run_id}",
        "start_time": attempt.pending_ms,
        "end_time": attempt.gone_ms if phase is Phase.ENDED else 0,
        "setup_duration": _spent(attempt.pending_ms, min(attempt.starts_ms, attempt.ends_ms), now_ms),
        "execution_duration": _spent(attempt.starts_ms, attempt.ends_ms, now_ms),
        "cleanup_duration": _spent(attempt.ends_ms, attempt.gone_ms, now_ms),
        **entry,
        **_states(run, phase, attempt.ending if phase is Phase.ENDED else None, task.key),
    }


def _states(run: Run, phase: Phase, ending: Ending | None, task_key: str | None) -> dict[str, Any]:
    """Both models; ``task_key``: of a task rather than of the run."""
    if ending is None:
        named = run.behaviour.running_as if phase is Phase.RUNNING else _STATUS.get(phase, phase.value)
        old = run.behaviour.running_as if phase is Phase.RUNNING else phase.value
        queued = {"queue_details": {"code": "ACTIVE_RUNS_LIMIT_REACHED", "message": "The workspace is full."}}
        return {
            "state": {"life_cycle_state": old, "state_message": "", "user_cancelled_or_timedout": False},
            "status": {"state": named, **(queued if phase is Phase.QUEUED else {})},
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
