# SPDX-License-Identifier: Apache-2.0
"""Where the tasks of a run stand at a moment: pure, from what was scripted and what was asked for meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from deepspeed_provider.testing.endings import (
    RUN_LIMIT,
    TIMED_OUT,
    UPSTREAM_FAILED,
    USER_CANCELED,
    At,
    Ending,
    of_tasks,
)


class Phase(StrEnum):
    """Named as ``RunLifeCycleState`` names them, but for the ends."""

    BLOCKED = "BLOCKED"
    QUEUED = "QUEUED"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    WAITING_FOR_RETRY = "WAITING_FOR_RETRY"
    TERMINATING = "TERMINATING"
    ENDED = "ENDED"


_SDK: Final = "databricks-sdk 0.162, jobs.RunLifeCycleState"
# Every step of a run or task, with who says that there is such a step.
TRANSITIONS: Final[Mapping[tuple[Phase, Phase], str]] = {
    (Phase.BLOCKED, Phase.PENDING): f"{_SDK}.BLOCKED: blocked on an upstream dependency",
    (Phase.BLOCKED, Phase.ENDED): "SDK jobs.RunIf.ALL_SUCCESS: skipped where an upstream task failed",
    (Phase.QUEUED, Phase.PENDING): f"{_SDK}.QUEUED",
    (Phase.QUEUED, Phase.ENDED): "SDK jobs.cancel_run; jobs.QueueSettings for a workspace without room and queue",
    (Phase.PENDING, Phase.RUNNING): f"{_SDK}.PENDING: waiting to be executed while the cluster is prepared",
    (Phase.PENDING, Phase.TERMINATING): "SDK jobs.TerminationCodeCode: capacity, libraries; jobs.cancel_run",
    (Phase.RUNNING, Phase.TERMINATING): f"{_SDK}.TERMINATING: cluster and execution context are being cleaned up",
    (Phase.RUNNING, Phase.WAITING_FOR_RETRY): f"{_SDK}.WAITING_FOR_RETRY; jobs.SubmitTask.max_retries",
    (Phase.PENDING, Phase.WAITING_FOR_RETRY): "SDK jobs.SubmitTask.max_retries counts INTERNAL_ERROR life cycles",
    (Phase.WAITING_FOR_RETRY, Phase.PENDING): "SDK jobs.SubmitTask.max_retries",
    (Phase.WAITING_FOR_RETRY, Phase.TERMINATING): "SDK jobs.cancel_run",
    (Phase.TERMINATING, Phase.ENDED): f"{_SDK}.TERMINATED",
}


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What happens to one submitted run; durations in virtual seconds.

    Attributes:
        endings: one for each attempt of each task; the last one is that of all attempts after it.
        of_task: instead, for tasks of these keys.
        queue_s: how long the workspace has no room for it.
        start_s: until the cluster is there and libraries are installed.
        stop_s: what a cluster takes to go, after the end and after a cancel.
        running_as: what the API calls the state while it runs, for a state that clients don't know yet.
    """

    endings: tuple[Ending, ...]
    of_task: Mapping[str, tuple[Ending, ...]]
    queue_s: float = 0.0
    start_s: float = 240.0
    run_s: float = 600.0
    stop_s: float = 30.0
    running_as: str = Phase.RUNNING.value

    def ending(self, task_key: str, attempt: int) -> Ending:
        endings = self.of_task.get(task_key, self.endings)
        return endings[min(attempt, len(endings) - 1)]


@dataclass(frozen=True, kw_only=True)
class TaskOrder:
    """What of a submitted task decides its course."""

    key: str
    depends_on: tuple[str, ...] = ()
    max_retries: int = 0
    retry_interval_ms: int = 0
    timeout_ms: int = 0


@dataclass(frozen=True, kw_only=True)
class Order:
    """What of a submitted run decides its course."""

    submitted_ms: int
    tasks: tuple[TaskOrder, ...]
    queue_enabled: bool = False
    timeout_ms: int = 0
    cancelled_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of a task; times in ms since the epoch, those to come included.

    Attributes:
        pending_ms: it leaves the queue. ``starts_ms``: its code starts. ``ends_ms``: its code has ended, or is stopped.
        gone_ms: its cluster has gone.
    """

    number: int
    pending_ms: int
    starts_ms: int
    ends_ms: int
    gone_ms: int
    ending: Ending

    def phase(self, now_ms: int) -> Phase:
        if now_ms >= self.gone_ms:
            return Phase.ENDED
        if now_ms >= self.ends_ms:
            return Phase.TERMINATING
        if now_ms >= self.starts_ms:
            return Phase.RUNNING
        return Phase.PENDING if now_ms >= self.pending_ms else Phase.QUEUED


@dataclass(frozen=True, kw_only=True)
class TaskCourse:
    """A task as it stands: the attempts begun so far; none of one that is blocked or was skipped."""

    key: str
    attempts: tuple[Attempt, ...]
    phase: Phase
    ending: Ending | None


@dataclass(frozen=True, kw_only=True)
class Course:
    """A run as it stands."""

    tasks: tuple[TaskCourse, ...]
    phase: Phase
    ending: Ending | None
    ended_ms: int | None


def course(order: Order, behaviour: Behaviour, now_ms: int) -> Course:
    """The run at ``now_ms``."""
    if behaviour.queue_s and not order.queue_enabled:
        refused = tuple(
            TaskCourse(key=task.key, attempts=(), phase=Phase.ENDED, ending=RUN_LIMIT) for task in order.tasks
        )
        return Course(tasks=refused, phase=Phase.ENDED, ending=RUN_LIMIT, ended_ms=order.submitted_ms)
    found: dict[str, TaskCourse] = {}
    for task in order.tasks:  # upstream tasks come first: the API refuses a key that it does not know yet
        found[task.key] = _task(task, order, behaviour, [found[key] for key in task.depends_on], now_ms)
    tasks = tuple(found.values())
    phase = _phase_of(tasks)
    if phase is not Phase.ENDED:
        return Course(tasks=tasks, phase=phase, ending=None, ended_ms=None)
    ended_ms = max([attempt.gone_ms for task in tasks for attempt in task.attempts], default=order.submitted_ms)
    endings = {task.key: task.ending for task in tasks if task.ending is not None}
    return Course(tasks=tasks, phase=phase, ending=of_tasks(endings), ended_ms=ended_ms)


def _task(task: TaskOrder, order: Order, behaviour: Behaviour, upstream: list[TaskCourse], now_ms: int) -> TaskCourse:
    if any(each.phase is not Phase.ENDED for each in upstream):
        return TaskCourse(key=task.key, attempts=(), phase=Phase.BLOCKED, ending=None)
    if any(each.ending is not None and not each.ending.succeeded for each in upstream):
        return TaskCourse(key=task.key, attempts=(), phase=Phase.ENDED, ending=UPSTREAM_FAILED)
    begins_ms = max([each.attempts[-1].gone_ms for each in upstream], default=order.submitted_ms)
    attempts: list[Attempt] = []
    while True:
        attempt = _attempt(len(attempts), begins_ms, task, order, behaviour)
        attempts.append(attempt)
        stopped = attempt.ending in (USER_CANCELED, TIMED_OUT)
        last = attempt.ending.succeeded or stopped or attempt.number == task.max_retries
        phase = attempt.phase(now_ms)
        if last or now_ms < attempt.ends_ms:
            ending = attempt.ending if phase is Phase.ENDED else None
            return TaskCourse(key=task.key, attempts=tuple(attempts), phase=phase, ending=ending)
        begins_ms = attempt.gone_ms + task.retry_interval_ms
        cancelled = order.cancelled_ms is not None and attempt.ends_ms <= order.cancelled_ms < begins_ms
        if cancelled or now_ms < begins_ms:
            return _between(task, attempts, behaviour, order.cancelled_ms if cancelled else None, now_ms)


def _between(
    task: TaskOrder, attempts: list[Attempt], behaviour: Behaviour, cancelled_ms: int | None, now_ms: int
) -> TaskCourse:
    """A task that waits for its next attempt, or that was cancelled meanwhile."""
    done = tuple(attempts)
    if cancelled_ms is None or now_ms < cancelled_ms:
        return TaskCourse(key=task.key, attempts=done, phase=Phase.WAITING_FOR_RETRY, ending=None)
    if now_ms < max(cancelled_ms + _ms(behaviour.stop_s), done[-1].gone_ms):
        return TaskCourse(key=task.key, attempts=done, phase=Phase.TERMINATING, ending=None)
    return TaskCourse(key=task.key, attempts=done, phase=Phase.ENDED, ending=USER_CANCELED)


def _attempt(number: int, begins_ms: int, task: TaskOrder, order: Order, behaviour: Behaviour) -> Attempt:
    ending = behaviour.ending(task.key, number)
    pending_ms = begins_ms + (_ms(behaviour.queue_s) if number == 0 else 0)
    starts_ms = pending_ms + _ms(behaviour.start_s)
    # A platform that fails to start one never runs its code.
    ends_ms = starts_ms if ending.at is At.PENDING else starts_ms + _ms(behaviour.run_s)
    for stop_ms, stopped in _stops(task, order, pending_ms):
        if stop_ms < ends_ms:
            ends_ms, ending = stop_ms, stopped
    gone_ms = ends_ms + (_ms(behaviour.stop_s) if ends_ms >= pending_ms else 0)
    return Attempt(
        number=number,
        pending_ms=pending_ms,
        starts_ms=starts_ms,
        ends_ms=ends_ms,
        gone_ms=gone_ms,
        ending=ending,
    )


def _stops(task: TaskOrder, order: Order, pending_ms: int) -> list[tuple[int, Ending]]:
    """When it would be stopped from outside, and how it ends then. A queue does not count as run time (assumed)."""
    limits = [limit for limit in (task.timeout_ms, order.timeout_ms) if limit]
    stops = [(pending_ms + limit, TIMED_OUT) for limit in limits]
    return stops if order.cancelled_ms is None else [*stops, (order.cancelled_ms, USER_CANCELED)]


# A run is where the task is that has come first of these.
_FIRST: Final = (
    Phase.RUNNING,
    Phase.TERMINATING,
    Phase.PENDING,
    Phase.WAITING_FOR_RETRY,
    Phase.QUEUED,
    Phase.BLOCKED,
)


def _phase_of(tasks: tuple[TaskCourse, ...]) -> Phase:
    phases = {task.phase for task in tasks}
    return next((phase for phase in _FIRST if phase in phases), Phase.ENDED)


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
