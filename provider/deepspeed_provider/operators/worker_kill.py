# SPDX-License-Identifier: Apache-2.0
"""What becomes of a run when its worker's process is told to end: whoever asked for that decides.

Airflow sends the same signal when a person marks the task, when a person clears it, when the attempt was
replaced by another and when the machine is emptied. Only its state tells them apart.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from deepspeed_provider.runs.record import OnClear
from deepspeed_provider.triggers.task_states import RESTARTING, RUNNING, TERMINAL_TASK_STATES

# Airflow kills a worker's task 5 s after asking it to end: what Airflow says must be known by then, and the
# request to cancel must be out.
LOOK_BOUND_SECONDS = 1.5
STOP_BOUND_SECONDS = 2.5
WAIT_BOUND_SECONDS = 10.0


class OnWorkerKill(StrEnum):
    """What ending a worker's process does to the run of a task that Airflow still takes for running."""

    CANCEL = "cancel"
    DETACH = "detach"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """What Airflow says about the task whose process is told to end.

    Attributes:
        superseded: this attempt is no longer the task's: it was cleared or replaced.
    """

    state: str | None
    superseded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KillVerdict:
    cancel: bool
    reason: str


def judge_kill(
    view: TaskView | None, *, on_clear: OnClear, on_worker_kill: OnWorkerKill, has_next_try: bool
) -> KillVerdict:
    """Whether the run is cancelled.

    Args:
        view: None when Airflow did not answer.
    """
    if view is None:
        # A person's wish reaches the worker through the same server that did not answer, so this is more likely
        # an outage; a run that nobody will take up again must not go on.
        cancel = on_worker_kill is OnWorkerKill.CANCEL and not has_next_try
        return KillVerdict(cancel=cancel, reason="the worker was told to end, and Airflow did not say why")
    if view.state in TERMINAL_TASK_STATES:
        return KillVerdict(cancel=True, reason=f"the task was set to {view.state}")
    if view.state == RESTARTING:
        return KillVerdict(cancel=on_clear is OnClear.RESTART, reason="the task was cleared")
    if view.state != RUNNING or view.superseded:
        return KillVerdict(cancel=False, reason="another attempt takes the run up")
    return KillVerdict(cancel=on_worker_kill is OnWorkerKill.CANCEL, reason="the worker was told to end")


class WorkerKill:
    """Settles, once and in a thread of its own, what becomes of the run.

    The signal may interrupt the main thread halfway through a request to Airflow's supervisor, whose lock it
    then holds: a signal handler that asked the supervisor would wait for itself. So the handler only starts
    the thread, and the main thread goes on until its next checkpoint, where it waits for the verdict.

    Args:
        look: asks Airflow; may raise or take for ever.
        judge: of the answer.
        stop: cancels the run as far as it is known now, within ``STOP_BOUND_SECONDS``.
    """

    def __init__(
        self,
        *,
        look: Callable[[], TaskView],
        judge: Callable[[TaskView | None], KillVerdict],
        stop: Callable[[], None],
        log: Any,
        look_bound_s: float = LOOK_BOUND_SECONDS,
    ) -> None:
        self._look = look
        self._judge = judge
        self._stop = stop
        self._log = log
        self._look_bound_s = look_bound_s
        self._thread: threading.Thread | None = None
        self._verdict: KillVerdict | None = None

    def start(self) -> None:
        """For a signal handler: returns at once, writes nothing, and can be called again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._settle, name="worker-kill", daemon=True)
            self._thread.start()

    def wait(self) -> KillVerdict:
        """The verdict, after the run was asked to stop if it is to be cancelled. Not for a signal handler."""
        self.start()
        assert self._thread is not None
        self._thread.join(WAIT_BOUND_SECONDS)
        return self._verdict or self._judge(None)

    def _settle(self) -> None:
        self._verdict = self._judge(self._view())
        if self._verdict.cancel:
            self._stop()

    def _view(self) -> TaskView | None:
        answers: queue.SimpleQueue[TaskView | None] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(self._look())
            except Exception as error:  # noqa: BLE001  (an answer that is none)
                self._log.warning("Airflow does not say what became of the task: %s", error)
                answers.put(None)

        threading.Thread(target=ask, name="worker-kill-look", daemon=True).start()
        try:
            return answers.get(timeout=self._look_bound_s)
        except queue.Empty:
            return None
