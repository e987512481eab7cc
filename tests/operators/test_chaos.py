# SPDX-License-Identifier: Apache-2.0
"""A thousand runs through the Jobs API while everything goes wrong: each paid for once, judged right, none left behind.

The operator, the trigger, the poller and the hook are the shipped ones, over HTTP. What there is of Airflow is this: a
try is ``execute``, or after a deferral ``resume``; a worker may die at any request or write; a try that died or failed
retryably is followed by the next while there is one; a person may clear a task at any time, which gives it more tries
and stops nothing; a triggerer may die at any time, and another one builds the trigger from its serialised form.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from deepspeed_provider.testing import endings, faults
from deepspeed_provider.testing.run_json import Run
from deepspeed_provider.testing.timeline import Course
from deepspeed_provider.testing.workspace import FakeWorkspace, behaviour

from operators.fake_task import Crash, crash_at
from operators.workspace_task import WorkspaceTask

RUNS = 1000
SEED = 20261130
FAULT_SHARE = 0.3
ENDINGS = {
    "": endings.succeeds(),
    "UNKNOWN": endings.fails("ValueError: no rows"),
    "GPU_OOM": endings.out_of_gpu_memory(rank=1, ranks=2),
    "CAPACITY": endings.stock_out(),
    "HOST_OOM": endings.host_killed(),
    "USER": endings.library_failure(),
    "TRANSIENT": endings.internal_error(),
}
RETRIED = ("UNKNOWN", "CAPACITY", "TRANSIENT")
# Of a generation whose submission was refused for its token, again and again: there is no run of it.
NOT_SENT = "TRANSIENT: Databricks refuses the run"


class RandomFaults(faults.Faults):
    """Nearly every third request goes wrong."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance
        self.taken: Counter[str] = Counter()

    def take(self, method: str, path: str) -> faults.Fault | None:
        if self._chance.random() >= FAULT_SHARE:
            return None
        name = self._chance.choice(list(FAULTS))
        self.taken[name] += 1
        return FAULTS[name]


FAULTS = {
    "request lost": faults.lost_request(),
    "answer lost": faults.lost_response(),
    "connection reset": faults.reset_connection(),
    "answered late": faults.late(0.001),
    "sent twice": faults.sent_twice(),
    "429 with a time": faults.too_many_requests(45),
    "429 with a long time": faults.too_many_requests(240),
    "429": faults.too_many_requests(None),
    "503": faults.server_error(503),
    "500 after the write": faults.server_error(500, after=True),
    "401": faults.refused_token(401),
}


@dataclass
class Story:
    """One task instance, from its first try to the end that Airflow would show."""

    workspace: FakeWorkspace
    chance: random.Random
    name: str
    happened: Counter[str] = field(default_factory=Counter)
    cleared: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.task = WorkspaceTask(workspace=self.workspace, run_id=self.name, options={"poll_interval": 300.0})
        self.task.retries = self.task.max_tries = 2
        self.deferrable = self.chance.random() < 0.5

    def play(self) -> tuple[Any, str]:
        """(output, message of the failure); one of them is empty."""
        for _ in range(30):
            ended = self._a_try()
            if ended is not None:
                return ended
            if self.task.try_number > self.task.max_tries:
                self._clear("cleared with no try left")
        raise AssertionError("it goes on for ever")

    def _a_try(self) -> tuple[Any, str] | None:
        self._arm()
        try:
            return self._to_its_end(), ""
        except Crash:
            self.happened["worker killed"] += 1
            return None
        except _Cleared:
            self._clear("cleared while alive")
            return None
        except AirflowFailException as error:
            return None, str(error)
        except AirflowException as error:
            self.happened["retried"] += 1
            return None if self.task.try_number <= self.task.max_tries else (None, str(error))

    def _clear(self, when: str) -> None:
        self.happened[when] += 1
        self.cleared.add(self.task.record["generation"] if self.task.record else 0)
        self.task.clear()

    def _arm(self) -> None:
        """Every other worker dies somewhere."""
        dies = self.chance.random() < 0.5
        moment = crash_at(self.chance.randint(1, 40)) if dies else (lambda *_: None)
        self.task.on_call = self.task.store.on_call = moment

    def _to_its_end(self) -> Any:
        try:
            return self.task.execute(deferrable=self.deferrable)
        except TaskDeferred as deferred:
            return self._after(deferred)

    def _after(self, deferred: TaskDeferred) -> Any:
        while True:
            if self.chance.random() < 0.1:
                raise _Cleared
            event = self._watched(deferred)
            try:
                return self.task.resume(deferred, event, deferrable=True)
            except TaskDeferred as again:
                deferred = again

    def _watched(self, deferred: TaskDeferred) -> dict[str, Any]:
        """What a trigger says in the end; some triggerers die before that."""
        while True:
            dies_after_s = self.chance.choice([None, None, self.chance.uniform(0.0, 1800.0)])
            event = asyncio.run(self._by_a_triggerer(deferred, dies_after_s))
            if event is not None:
                return event
            self.happened["triggerer killed"] += 1

    async def _by_a_triggerer(self, deferred: TaskDeferred, dies_after_s: float | None) -> dict[str, Any] | None:
        watching = asyncio.create_task(self.task.watched(deferred))
        began_s = self.task.clock.now_s
        while not watching.done():
            if dies_after_s is not None and self.task.clock.now_s - began_s > dies_after_s:
                watching.cancel()
                await asyncio.wait([watching])
                return None
            await asyncio.sleep(0)
        return watching.result()


class _Cleared(Exception):
    """A person has cleared the deferred task."""


def judge(story: Story, output: Any, message: str) -> list[str]:
    """What is wrong with how it went."""
    runs = [run for run in story.workspace.runs if story.name in run.name]
    courses = [run.course(story.workspace.clock.now_ms) for run in runs]
    return [*_paid(story, runs, courses), *_told(runs, courses, output, message)]


def _paid(story: Story, runs: list[Run], courses: list[Course]) -> list[str]:
    wrong = []
    generation = story.task.record["generation"]
    if len({run.token for run in runs}) != len(runs) or len(runs) > generation:
        wrong.append(f"{len(runs)} runs for {generation} generations")
    if any(course.ended_ms is None for course in courses):
        wrong.append("a run is left behind")
    elif any(before.ended_ms > after.submitted_ms for before, after in zip(courses, runs[1:], strict=False)):
        wrong.append("two runs were alive at once")
    if any(run.cancels for run in runs):
        wrong.append("a run was cancelled, and nobody had asked for it")
    # Who clears a task that has ended wants it to run again.
    early = [
        course.ending.code
        for number, course in enumerate(courses[:-1], start=1)
        if _kind(course.ending) not in RETRIED and number not in story.cleared
    ]
    return [*wrong, f"a run was paid for after {early}"] if early else wrong


def _told(runs: list[Run], courses: list[Course], output: Any, message: str) -> list[str]:
    if message.startswith(NOT_SENT):
        return []
    if not runs:
        return [f"nothing ran, and it is told that {message or output}"]
    ending = courses[-1].ending
    if output is not None:
        right = ending.succeeded and output["token"] == runs[-1].token
        return [] if right else [f"a success is told of a run that ended {ending.code}"]
    kind = _kind(ending)
    return [] if kind and message.startswith(kind) else [f"{ending.code} is told as {message.splitlines()[0]}"]


def _kind(ending: endings.Ending) -> str:
    return next(kind for kind, each in ENDINGS.items() if (each.code, each.error) == (ending.code, ending.error))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_runs_while_everything_goes_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(SEED)
    happened: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {}
    submitted = 0
    faulty = RandomFaults(random.Random(SEED))
    with FakeWorkspace(faults=faulty) as workspace:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", workspace.connection_json)
        for number in range(RUNS):
            name = f"run-{number:04d}-of-chaos"
            workspace.default_behaviour = behaviour(
                chance.choices(list(ENDINGS.values()), [12, 1, 1, 1, 1, 1, 1])[0],
                queue_s=chance.choice([0.0, 0.0, 900.0]),
                start_s=chance.uniform(0.0, 600.0),
                run_s=chance.uniform(0.0, 3600.0),
            )
            story = Story(workspace, random.Random(f"{SEED}-{number}"), name)
            output, message = story.play()
            found = judge(story, output, message)
            if found:
                wrong[name] = found
            happened += story.happened
            happened["succeeded" if output is not None else "failed"] += 1
            submitted += len(workspace.runs)
            workspace.jobs.runs.clear()
            workspace.requests.clear()
    with capsys.disabled():
        print(f"\n{RUNS} tasks, {submitted} runs; {dict(happened)}; faults: {dict(faulty.taken)}; wrong: {len(wrong)}")
    assert wrong == {}
    assert happened["worker killed"] > RUNS / 4
    assert happened["triggerer killed"] > RUNS / 10
    assert happened["cleared while alive"] > 20
