"""What is done to a task, and what must hold afterwards; the same for every place where its run can be.

| scenario | what must hold |
|---|---|
| worker killed before anything is stored, before it submits, within its submission, | one run, generation 1: the next |
| or before it notes the run | try attaches, or submits what never arrived |
| worker killed while the run goes on; with its supervisor, as when a machine is lost | one run; the next try attaches |
| worker told to end (SIGTERM), ``on_worker_kill="cancel"`` | the run stops; the next try starts anew |
| the same with ``"detach"`` | one run; the next try attaches |
| triggerer restarted (SIGTERM) or killed (SIGKILL) | one run, which another triggerer sees through |
| scheduler killed | one run, which the next scheduler sees the end of |
| cleared while alive | one run; the new try attaches |
| cleared while alive, ``on_clear="restart"`` | the run stops before the new one begins |
| cleared after a success | a new run, generation 2 |
| marked failed | the run is cancelled, its processes are gone |
| own deadline | the same; the task fails without a retry |
| mapped over three, one worker killed | three runs, each once |
| run deleted by someone else while deferred | a new run, generation 2 |
| ended before the first defer | nothing is deferred |
| a life-cycle state of tomorrow | it is waited for, as for a running one |

Runs are counted by the cluster and by the lines that their ranks append (``places.py``).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backends import processes
from backends.processes import alive

from crash.places import Place, WorkspacePlace
from crash.runs import wait_for

SPARK_CONNECT, EXECUTING, PLAYED, AT_ONCE = "spark_connect", "databricks", "databricks_played", "databricks_at_once"
BOTH = (SPARK_CONNECT, EXECUTING)
MODES = ("deferred", "blocking")
# What Airflow writes into a task's log then.
DEFERRING = "Pausing task as DEFERRED"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """``play`` takes the place named ``place``, and raises AssertionError."""

    name: str
    place: str
    play: Callable[[Any], None]

    @property
    def id(self) -> str:
        return f"{self.place}: {self.name}"


def deadline(place: Place, mode: str) -> None:
    run = place.trigger(f"deadline_{mode}", seconds=300)
    run.end("failed")
    place.require_cancelled(run)
    assert run.task["try_number"] == 1, "no retry"
    assert "deadline" in run.log()


def marked_failed(place: Place, mode: str) -> None:
    run = place.trigger(mode, seconds=300)
    run.wait_for_ranks()
    run.wait_for_task(_alive_in(mode))
    run.mark_task("failed")
    run.end("failed")
    run.wait_until_ranks_are_gone()
    if isinstance(place, WorkspacePlace):
        wait_for(lambda: None not in place.codes(run), 60, run.unless("the run ended"))
    place.require_cancelled(run)


def cleared_while_alive(place: Place, mode: str) -> None:
    run = place.trigger(mode, seconds=25)
    run.wait_for_ranks()
    run.wait_for_task(_alive_in(mode))
    run.clear()
    run.wait_for_try(2)
    run.end()
    place.require_runs(run, 1)
    assert run.result()["generation"] == 1


def cleared_with_restart(place: Place) -> None:
    run = place.trigger("restart", seconds=25)
    run.wait_for_ranks()
    run.wait_for_task("running")
    run.clear()
    run.wait_for_try(2)
    run.wait_for_ranks(3)
    assert not alive(run.marks.pids()[:2]), "two runs at once"
    run.end()
    place.require_runs(run, 2)
    assert run.result()["generation"] == 2


def cleared_after_success(place: Place) -> None:
    run = place.trigger("deferred", seconds=1)
    run.end()
    place.require_runs(run, 1)
    run.clear()
    run.wait_for_try(2)
    run.end()
    place.require_runs(run, 2)
    assert run.result()["generation"] == 2


def worker_killed_at(place: Place, mode: str, moment: str) -> None:
    """At a moment at which the worker waits for it."""
    run = place.trigger(mode, seconds=3, hold=moment)
    run.kill_worker_at(moment)
    run.end()
    place.require_runs(run, 1)
    assert run.result()["generation"] == 1
    assert run.task["try_number"] == 2


def worker_killed_after(place: Place, mode: str, delay_s: float) -> None:
    """Somewhere in its submission."""
    run = place.trigger(mode, seconds=3)
    worker = run.worker_at("minting")
    time.sleep(delay_s)
    os.kill(worker, signal.SIGKILL)
    run.end()
    place.require_runs(run, 1)
    assert run.result()["generation"] == 1


def worker_killed_within(place: WorkspacePlace, mode: str) -> None:
    """The submission has become a run, and its answer is on the way."""
    run = place.trigger(mode, seconds=3)
    worker = run.worker_at("submitting")
    processes.wait_for(lambda: place.runs(run), 60, run.unless("the submission arrived"), pause_s=0.02)
    os.kill(worker, signal.SIGKILL)
    run.end()
    assert {"moment": "submitted", "pid": worker} not in run.moments(), "it was too late"
    place.require_runs(run, 1)
    assert run.result()["generation"] == 1


def worker_killed_while_running(place: Place) -> None:
    run = place.trigger("blocking", seconds=15)
    run.wait_for_ranks()
    run.kill_worker_at("submitted")
    run.end()
    place.require_runs(run, 1)
    assert run.task["try_number"] == 2, "a later try attached"


def machine_lost_while_running(place: Place) -> None:
    """Nobody is left to say that the worker died: Airflow misses its heartbeats."""
    run = place.trigger("blocking", seconds=45)
    run.wait_for_ranks()
    worker = run.worker_at("submitted")
    for pid in (run.supervisor_of(worker), worker):
        os.kill(pid, signal.SIGKILL)
    run.end()
    place.require_runs(run, 1)
    assert run.task["try_number"] == 2, "a later try attached"


def worker_told_to_end_cancels(place: Place) -> None:
    run = place.trigger("blocking", seconds=25)
    run.wait_for_ranks()
    os.kill(run.supervisor_of(run.worker_at("submitted")), signal.SIGTERM)
    first = run.marks.pids()[:2]
    run.wait_for_ranks(4)
    assert not alive(first), "two runs at once"
    run.end()
    place.require_runs(run, 2)
    assert run.result()["generation"] == 2
    if isinstance(place, WorkspacePlace):
        assert place.codes(run) == ["USER_CANCELED", "SUCCESS"]


def worker_told_to_end_detaches(place: Place) -> None:
    run = place.trigger("detach", seconds=15)
    run.wait_for_ranks()
    os.kill(run.supervisor_of(run.worker_at("submitted")), signal.SIGTERM)
    run.end()
    place.require_runs(run, 1)
    assert run.result()["generation"] == 1
    assert run.task["try_number"] == 2, "a later try attached"


def mapped(place: Place) -> None:
    run = place.trigger("mapped", seconds=5, hold="submitted 1")
    run.kill_worker_at("submitted 1")
    run.end()
    place.require_runs(run, 3)
    results = [run.result(index) for index in range(3)]
    assert [each["generation"] for each in results] == [1, 1, 1]
    assert len({each["token"] for each in results}) == 3
    assert sorted(each["try_number"] for each in run.tasks) == [1, 1, 2]


def run_deleted_while_deferred(place: WorkspacePlace) -> None:
    run = place.trigger("deferred")
    run.wait_for_task("deferred")
    (first,) = place.runs(run)
    place.workspace.jobs.forget(first.run_id)
    run.end()
    assert first.token not in {each.token for each in place.runs(run)}
    place.require_runs(run, 1)
    assert run.result()["generation"] == 2
    assert run.task["try_number"] == 1, "within the same try"


def ended_before_the_first_defer(place: WorkspacePlace) -> None:
    run = place.trigger("deferred")
    run.end()
    place.require_runs(run, 1)
    assert DEFERRING not in run.log(), str(run)


def state_of_tomorrow(place: WorkspacePlace, mode: str) -> None:
    run = place.trigger(mode)
    run.wait_for_task(_alive_in(mode))
    run.end()
    place.require_runs(run, 1)
    assert (DEFERRING in run.log()) is (mode == "deferred")
    assert run.result()["generation"] == 1
    assert run.task["try_number"] == 1


def _alive_in(mode: str) -> str:
    return "deferred" if mode == "deferred" else "running"


def _scenarios() -> list[Scenario]:
    found: list[Scenario] = []

    def add(name: str, play: Callable[..., None], *arguments: Any, places: tuple[str, ...] = BOTH) -> None:
        for place in places:
            found.append(Scenario(name=name, place=place, play=lambda where: play(where, *arguments)))

    # The longest first.
    add("worker and supervisor killed", machine_lost_while_running, places=(EXECUTING,))
    for mode in MODES:
        add(f"deadline, {mode}", deadline, mode)
        add(f"cleared while alive, {mode}", cleared_while_alive, mode)
    add("cleared while alive, restart", cleared_with_restart)
    add("worker told to end, cancel", worker_told_to_end_cancels)
    add("worker told to end, detach", worker_told_to_end_detaches)
    add("cleared after success", cleared_after_success, places=(SPARK_CONNECT, PLAYED))
    add("mapped, a worker killed", mapped, places=(SPARK_CONNECT, PLAYED))
    add("worker killed while running", worker_killed_while_running)
    for moment, words in (
        ("minting", "before anything is stored"),
        ("submitting", "before it submits"),
        ("submitted", "before it notes the run"),
    ):
        # Where nothing has arrived yet there is nothing to execute.
        databricks = EXECUTING if moment == "submitted" else PLAYED
        add(
            f"worker killed {words}, blocking", worker_killed_at, "blocking", moment, places=(SPARK_CONNECT, databricks)
        )
        add(f"worker killed {words}, deferred", worker_killed_at, "deferred", moment, places=(databricks,))
    for mode in MODES:
        add(f"worker killed within its submission, {mode}", worker_killed_within, mode, places=(EXECUTING,))
    for mode, delay_s in (("deferred", 0.2), ("deferred", 0.5), ("blocking", 0.9)):
        add(f"worker killed after {delay_s} s, {mode}", worker_killed_after, mode, delay_s, places=(SPARK_CONNECT,))
    for mode in MODES:
        add(f"marked failed, {mode}", marked_failed, mode)
        add(f"state of tomorrow, {mode}", state_of_tomorrow, mode, places=(PLAYED,))
    add("run deleted while deferred", run_deleted_while_deferred, places=(PLAYED,))
    add("ended before the first defer", ended_before_the_first_defer, places=(AT_ONCE,))
    return found


SCENARIOS = {each.id: each for each in _scenarios()}
