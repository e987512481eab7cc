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
    USER_CANCELED,
    At,
    Ending,
    after,
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
FIRST: Final = (Phase.BLOCKED, Phase.QUEUED, Phase.PENDING, Phase.ENDED)
# Every step of a run, a task or an attempt, with who says that there is such a step. A phase that takes no time is
# passed unseen.
TRANSITIONS: Final[Mapping[tuple[Phase, Phase], str]] = {
    (Phase.BLOCKED, Phase.PENDING): f"{_SDK}.BLOCKED: blocked on an upstream dependency",
    (Phase.BLOCKED, Phase.ENDED): "SDK jobs.RunIf.ALL_SUCCESS: skipped where an upstream task failed; jobs.cancel_run",
    (Phase.QUEUED, Phase.PENDING): f"{_SDK}.QUEUED",
    (Phase.QUEUED, Phase.ENDED): "SDK jobs.cancel_run: nothing runs that would have to be cleaned up (assumed)",
    (Phase.PENDING, Phase.RUNNING): f"{_SDK}.PENDING: waiting to be executed while the cluster is prepared",
    (Phase.PENDING, Phase.TERMINATING): "SDK jobs.TerminationCodeCode: capacity, libraries; jobs.cancel_run",
    (Phase.PENDING, Phase.WAITING_FOR_RETRY): "SDK jobs.SubmitTask.max_retries counts INTERNAL_ERROR life cycles",
    (Phase.RUNNING, Phase.TERMINATING): f"{_SDK}.TERMINATING: cluster and execution context are being cleaned up",
    (Phase.RUNNING, Phase.WAITING_FOR_RETRY): f"{_SDK}.WAITING_FOR_RETRY; jobs.SubmitTask.max_retries",
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
        queue_s: how long the workspace has no room for it; without a queue in its request it is refused then.
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
    """What of a submitted task decides its course.

    Attributes:
        max_retries: -1 for no end of them. retry_interval_ms: at least, from the start of one attempt to the next.
        timeout_ms: of each attempt; 0 for none.
    """

    key: str
    depends_on: tuple[str, ...] = ()
    max_retries: int = 0
    retry_interval_ms: int = 0
    retry_on_timeout: bool = False
    timeout_ms: int = 0

    def retries(self, attempt: Attempt) -> bool:
        """Whether another attempt follows this one."""
        ending = attempt.ending
        wanted = ending.counts_as_failed or (ending is TIMED_OUT and self.retry_on_timeout)
        return wanted and (self.max_retries < 0 or attempt.number < self.max_retries)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What of a submitted run decides its course."""

    submitted_ms: int
    tasks: tuple[TaskOrder, ...]
    queue_enabled: bool = False
    timeout_ms: int = 0
    cancelled_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stop:
    """What ends a whole run from outside."""

    at_ms: int
    ending: Ending

    def forestalls(self, begins_ms: int, now_ms: int) -> bool:
        """Whether it has come before that.

        In the same millisecond a limit comes first, but a cancel does not: who cancelled may have seen it begin.
        """
        return self.at_ms <= now_ms and self.at_ms < begins_ms + (self.ending is TIMED_OUT)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of a task; times in ms since the epoch, those to come included.

    Attributes:
        begins_ms: it is there. ``pending_ms``: it leaves the queue. ``starts_ms``: its code starts.
        ends_ms: its code has ended, or is stopped. ``gone_ms``: its cluster has gone.
    """

    number: int
    begins_ms: int
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

    def ran(self, now_ms: int) -> bool:
        """Whether its code has started by now."""
        return self.starts_ms <= now_ms and self.starts_ms < self.ends_ms

    def has_cluster(self, now_ms: int) -> bool:
        """Whether a cluster has been asked for by now."""
        return self.pending_ms <= min(now_ms, self.ends_ms)


@dataclass(frozen=True, kw_only=True)
class TaskCourse:
    """A task as it stands.

    Attributes:
        attempts: those begun so far; none of a task that is blocked or was skipped.
        ending, ended_ms: known as soon as no further attempt can follow: while it is TERMINATING, too.
    """

    key: str
    attempts: tuple[Attempt, ...]
    phase: Phase
    ending: Ending | None = None
    ended_ms: int = 0


@dataclass(frozen=True, kw_only=True)
class Course:
    """A run as it stands; it has an ending once it has ended."""

    tasks: tuple[TaskCourse, ...]
    phase: Phase
    ending: Ending | None = None
    ended_ms: int | None = None


def course(order: Order, behaviour: Behaviour, now_ms: int) -> Course:
    """The run at ``now_ms``."""
    if behaviour.queue_s and not order.queue_enabled:
        refused = tuple(_over(task, (), RUN_LIMIT, order.submitted_ms, now_ms) for task in order.tasks)
        return Course(tasks=refused, phase=Phase.ENDED, ending=RUN_LIMIT, ended_ms=order.submitted_ms)
    stop = _stop(order, behaviour)
    found: dict[str, TaskCourse] = {}
    for task in order.tasks:  # upstream tasks come first: the API refuses a key that it does not know yet
        found[task.key] = _task(task, order, behaviour, stop, [found[key] for key in task.depends_on], now_ms)
    tasks = tuple(found.values())
    phase = _phase_of(tasks, now_ms)
    if phase is not Phase.ENDED:
        return Course(tasks=tasks, phase=phase)
    endings = {task.key: task.ending for task in tasks if task.ending is not None}
    return Course(tasks=tasks, phase=phase, ending=of_tasks(endings), ended_ms=max(task.ended_ms for task in tasks))


def _stop(order: Order, behaviour: Behaviour) -> Stop | None:
    """What comes first of a cancel and the run's own limit. A queue does not count as run time (assumed)."""
    stops = []
    if order.timeout_ms:
        leaves_queue_ms = order.submitted_ms + _ms(behaviour.queue_s)
        stops.append(Stop(at_ms=leaves_queue_ms + order.timeout_ms, ending=TIMED_OUT))
    if order.cancelled_ms is not None:
        stops.append(Stop(at_ms=order.cancelled_ms, ending=USER_CANCELED))
    return min(stops, key=lambda each: each.at_ms, default=None)


def _task(
    task: TaskOrder, order: Order, behaviour: Behaviour, stop: Stop | None, upstream: list[TaskCourse], now_ms: int
) -> TaskCourse:
    endings = [each.ending for each in upstream if each.ending is not None]
    skipped = after(endings) if len(endings) == len(upstream) else None
    begins_ms = max([each.ended_ms for each in upstream], default=order.submitted_ms)
    if skipped is not None:
        return _over(task, (), skipped, 0, now_ms)
    blocked = any(each.phase is not Phase.ENDED for each in upstream)
    if stop is not None and stop.forestalls(now_ms + 1 if blocked else begins_ms, now_ms):
        return _over(task, (), stop.ending, stop.at_ms, now_ms)
    if blocked:
        return TaskCourse(key=task.key, attempts=(), phase=Phase.BLOCKED)
    queue_ms = 0 if upstream else _ms(behaviour.queue_s)  # a run gets its room once, for all its tasks
    return _attempts(task, behaviour, stop, begins_ms, queue_ms, now_ms)


def _attempts(
    task: TaskOrder, behaviour: Behaviour, stop: Stop | None, begins_ms: int, queue_ms: int, now_ms: int
) -> TaskCourse:
    """A task that nothing upstream holds back."""
    attempts: list[Attempt] = []
    while True:
        attempt = _attempt(len(attempts), begins_ms, queue_ms, task, behaviour, stop)
        attempts.append(attempt)
        done = tuple(attempts)
        if now_ms < attempt.ends_ms:
            return TaskCourse(key=task.key, attempts=done, phase=attempt.phase(now_ms))
        stopped = stop is not None and attempt.ending is stop.ending and attempt.ends_ms == stop.at_ms
        if stopped or not task.retries(attempt):
            return _over(task, done, attempt.ending, attempt.gone_ms, now_ms)
        # A millisecond at least, or retries without end would never come to now.
        begins_ms = max(attempt.gone_ms, attempt.pending_ms + max(1, task.retry_interval_ms))
        queue_ms = 0
        if stop is not None and stop.forestalls(begins_ms, now_ms):
            return _over(task, done, stop.ending, stop.at_ms + _ms(behaviour.stop_s), now_ms)
        if now_ms < begins_ms:
            return TaskCourse(key=task.key, attempts=done, phase=Phase.WAITING_FOR_RETRY)


def _over(task: TaskOrder, attempts: tuple[Attempt, ...], ending: Ending, ended_ms: int, now_ms: int) -> TaskCourse:
    """A task that has its ending, with its cluster still there until ``ended_ms``."""
    phase = Phase.ENDED if now_ms >= ended_ms else Phase.TERMINATING
    return TaskCourse(key=task.key, attempts=attempts, phase=phase, ending=ending, ended_ms=ended_ms)


def _attempt(
    number: int, begins_ms: int, queue_ms: int, task: TaskOrder, behaviour: Behaviour, stop: Stop | None
) -> Attempt:
    ending = behaviour.ending(task.key, number)
    pending_ms = begins_ms + queue_ms
    starts_ms = pending_ms + _ms(behaviour.start_s)
    # One that cannot be started never runs its code.
    ends_ms = starts_ms if ending.at is At.PENDING else starts_ms + _ms(behaviour.run_s)
    if task.timeout_ms and pending_ms + task.timeout_ms < ends_ms:
        ends_ms, ending = pending_ms + task.timeout_ms, TIMED_OUT
    if stop is not None and stop.at_ms < ends_ms:
        ends_ms, ending = stop.at_ms, stop.ending
    return Attempt(
        number=number,
        begins_ms=begins_ms,
        pending_ms=pending_ms,
        starts_ms=starts_ms,
        ends_ms=ends_ms,
        gone_ms=ends_ms + (_ms(behaviour.stop_s) if ends_ms >= pending_ms else 0),
        ending=ending,
    )


def _phase_of(tasks: tuple[TaskCourse, ...], now_ms: int) -> Phase:
    """Where the run is.

    A run of several tasks is RUNNING from the first code to the last (assumed: nothing says what it is called while
    one task has ended and the next is not there yet).
    """
    if len(tasks) == 1:
        return tasks[0].phase
    alive = {task.phase for task in tasks} - {Phase.ENDED}
    if not alive:
        return Phase.ENDED
    if alive == {Phase.TERMINATING}:
        return Phase.TERMINATING
    if any(attempt.ran(now_ms) for task in tasks for attempt in task.attempts):
        return Phase.RUNNING
    return Phase.QUEUED if Phase.QUEUED in alive else Phase.PENDING


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
