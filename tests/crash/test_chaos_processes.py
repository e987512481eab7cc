"""Twenty seeds of the chaos in ``operators/test_chaos.py``, on real processes and in real time.

Each is a DAG run on a real ``airflow standalone``, whose workers kill themselves (``dags/chaos.py``), and which is
cleared, where the seed says so. The triggerer that all share is ended again and again, and of the requests to the
workspace nearly every third goes wrong. Runs live as in virtual time, but four hundred times shorter.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from deepspeed_provider.testing.faults import RandomFaults
from deepspeed_provider.testing.workspace import FakeWorkspace
from operators.chaos import SEED, Ended, Fate, course_of_a_run

from crash.conftest import FAULTY, Grounds
from crash.places import WorkspacePlace
from crash.stack import Stack

SEEDS = 20
SECOND = 1 / 400
MOST_TRIES = 30
MOST_CLEARS = 2
TRIGGERER_LIVES_SECONDS = 20.0
# On a quiet machine it takes a third of it.
BOUND_SECONDS = 300.0
# Both clocks are this machine's; the API tells microseconds, the workspace milliseconds.
TOLERANCE_MS = 2.0


class Story:
    """One DAG run, from its first try to its end."""

    def __init__(self, place: WorkspacePlace, seed: str) -> None:
        self._place = place
        self._fate = Fate(seed)
        self._deaths = [self._fate.worker_dies_at(number) for number in range(1, MOST_TRIES + 1)]
        mode = "deferred" if self._fate.deferrable else "blocking"
        self.run = place.trigger(mode, dag="chaos", deaths=self._deaths)
        self.happened: Counter[str] = Counter()
        self._cleared: set[int] = set()
        self._died: set[int] = set()
        self.ended: dict[str, Any] | None = None

    def look(self, task: dict[str, Any]) -> None:
        """What a person does who sees the task so."""
        number = task["try_number"]
        self._died |= {each for each in range(1, number + 1) if self._has_died(each)}
        if task["state"] == "failed" and not self.run.failure():
            self._clear("cleared with no try left")
        elif task["state"] in ("success", "failed"):
            self.ended = task
            self.happened["worker killed"] = len(self._died)
            self.happened["succeeded" if task["state"] == "success" else "failed"] = 1
        elif task["state"] in ("running", "deferred") and self._is_to_be_cleared(number):
            self._clear("cleared while alive")

    def _is_to_be_cleared(self, try_number: int) -> bool:
        return self._fate.is_cleared(try_number) and self.happened["cleared while alive"] < MOST_CLEARS

    def _has_died(self, number: int) -> bool:
        last, path = self._deaths[number - 1], self.run.folder / f"instructions-{number}"
        return last is not None and path.exists() and path.stat().st_size >= last

    def _clear(self, when: str) -> None:
        self.happened[when] += 1
        self._cleared.add(self._generation())
        self.run.clear()
        self._cleared.add(self._generation())

    def _generation(self) -> int:
        record = self.run.record()
        return 0 if record is None else record["generation"]

    def wrong(self, wall_ms: float) -> list[str]:
        """What is wrong with how it went; ``wall_ms``: what the wall's clock is ahead of the workspace's."""
        if self.ended is None:
            return [f"it goes on: {self.run}"]
        runs = self._place.runs(self.run)
        courses = [each.course(self._place.workspace.clock.now_ms) for each in runs]
        succeeded = self.ended["state"] == "success"
        told = Ended(
            runs=runs,
            courses=courses,
            record=self.run.record() or {"generation": 0},
            cleared=self._cleared,
            output=self.run.result() if succeeded else None,
            message="" if succeeded else self.run.failure(),
        )
        ended_ms = 1000 * datetime.fromisoformat(self.ended["end_date"]).timestamp()
        later = [each for each in courses if (each.ended_ms or 0) + wall_ms > ended_ms + TOLERANCE_MS]
        return [*told.wrong, *(["a run outlived its task"] if later else [])]


@pytest.fixture
def place(grounds: Grounds) -> WorkspacePlace:
    """A workspace on which nearly every third request goes wrong."""
    found = grounds.places[FAULTY]
    assert isinstance(found, WorkspacePlace)
    chance = random.Random(SEED)
    for _ in range(SEEDS * MOST_TRIES):
        course = course_of_a_run(chance, second=SECOND)
        found.workspace.next_run(
            *course.endings,
            queue_s=course.queue_s,
            start_s=course.start_s,
            run_s=course.run_s,
            stop_s=course.stop_s,
        )
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_seeds_on_real_processes(
    grounds: Grounds, place: WorkspacePlace, capsys: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    stories = [Story(place, f"{SEED}-{number}") for number in range(SEEDS)]
    triggerers = _until_all_have_ended(grounds.stack, stories)
    wall_ms = 1000 * time.time() - place.workspace.clock.now_ms
    wrong = {story.run.run_id: found for story in stories if (found := story.wrong(wall_ms))}
    happened = sum((story.happened for story in stories), Counter())
    with capsys.disabled():
        print(
            f"\n{SEEDS} tasks in {time.monotonic() - began_s:.0f} s, {len(place.workspace.runs)} runs of "
            f"{len(place.workspace.requests_for('jobs/runs/submit'))} submissions; {dict(happened)}, "
            f"triggerers ended: {triggerers}; faults: {dict(_faults(place.workspace).taken)} of "
            f"{len(place.workspace.requests)} requests; wrong: {len(wrong)}"
        )
    assert not wrong, wrong
    assert happened["worker killed"] > SEEDS / 4
    assert triggerers > 0


def _faults(workspace: FakeWorkspace) -> RandomFaults:
    assert isinstance(workspace.faults, RandomFaults)
    return workspace.faults


def _until_all_have_ended(stack: Stack, stories: list[Story]) -> int:
    """Looks at all of them again and again; how many triggerers were ended meanwhile."""
    deadline_s = time.monotonic() + BOUND_SECONDS
    by_id = {story.run.run_id: story for story in stories}
    over = threading.Event()
    with ThreadPoolExecutor(1) as aside:
        triggerers = aside.submit(_end_triggerers, stack, over)
        try:
            while any(story.ended is None for story in stories) and time.monotonic() < deadline_s:
                for task in _tasks(stack):
                    story = by_id.get(task["dag_run_id"])
                    if story is not None and story.ended is None:
                        story.look(task)
                time.sleep(1)
        finally:
            over.set()
    return triggerers.result()


def _end_triggerers(stack: Stack, over: threading.Event) -> int:
    count = 0
    while not over.wait(TRIGGERER_LIVES_SECONDS):
        stack.replace_triggerer([signal.SIGKILL, signal.SIGTERM][count % 2])
        count += 1
    return count


def _tasks(stack: Stack) -> list[dict[str, Any]]:
    """All task instances of chaos, in two requests."""
    found = []
    for mode in ("deferred", "blocking"):
        path = f"/dags/chaos_{mode}/dagRuns/~/taskInstances"
        found += stack.api.call("GET", path, params={"limit": 100})["task_instances"]
    return found
