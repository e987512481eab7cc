# SPDX-License-Identifier: Apache-2.0
"""A thousand runs through the Jobs API while everything goes wrong: each paid for once, judged right, none left behind.

The operator, the trigger, the poller and the hook are the shipped ones, over HTTP. What there is of Airflow is this: a
try is ``execute``, or after a deferral ``resume``; a worker may die at any request or write; a try that died or failed
retryably is followed by the next while there is one; a person may clear a task at any time, which gives it more tries
and stops nothing; a triggerer may die at any time, and another one builds the trigger from its serialised form.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from deepspeed_provider.testing.faults import RandomFaults, every_kind
from deepspeed_provider.testing.workspace import FakeWorkspace

from operators.chaos import FAULT_SHARE, SEED, STORMY_TRIES, Ended, Fate, course_of_a_run
from operators.fake_task import Crash, crash_at
from operators.workspace_task import WorkspaceTask

RUNS = 1000
# Side by side, each in a process of its own.
SHARDS = 2


@dataclass
class Story:
    """One task instance, from its first try to the end that Airflow would show."""

    workspace: FakeWorkspace
    fate: Fate
    name: str
    happened: Counter[str] = field(default_factory=Counter)
    cleared: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.task = WorkspaceTask(workspace=self.workspace, run_id=self.name, options={"poll_interval": 300.0})
        self.task.retries = self.task.max_tries = 2

    def play(self) -> tuple[Any, str]:
        """(output, message of the failure); one of them is empty."""
        for _ in range(STORMY_TRIES + self.task.retries + 1):
            ended = self._a_try()
            if ended is not None:
                return ended
            if self.task.try_number > self.task.max_tries:
                self._clear("cleared with no try left")
        raise AssertionError(f"{self.name} goes on when nobody disturbs it any more: {dict(self.happened)}")

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
        count = self.fate.worker_dies_at(self.task.try_number + 1)
        moment = (lambda *_: None) if count is None else crash_at(count)
        self.task.on_call = self.task.store.on_call = moment

    def _to_its_end(self) -> Any:
        try:
            return self.task.execute(deferrable=self.fate.deferrable)
        except TaskDeferred as deferred:
            return self._after(deferred)

    def _after(self, deferred: TaskDeferred) -> Any:
        while True:
            if self.fate.is_cleared(self.task.try_number):
                raise _Cleared
            event = self._watched(deferred)
            try:
                return self.task.resume(deferred, event, deferrable=True)
            except TaskDeferred as again:
                deferred = again

    def _watched(self, deferred: TaskDeferred) -> dict[str, Any]:
        """What a trigger says in the end; some triggerers die before that."""
        while True:
            dies_after_s = self.fate.triggerer_dies_after_s()
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
    ended = Ended(
        runs=runs,
        courses=[run.course(story.workspace.clock.now_ms) for run in runs],
        record=story.task.record,
        cleared=story.cleared,
        output=output,
        message=message,
    )
    asked = ["somebody asked to cancel a run"] if any(run.cancels for run in runs) else []
    return [*asked, *ended.wrong]


@dataclass
class Played:
    """What became of many tasks."""

    submitted: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=dict)


def play(shard: int) -> Played:
    """Some of the tasks, one after the other, on a workspace of their own."""
    chance, played = random.Random(f"{SEED}-{shard}"), Played()
    faulty = RandomFaults(
        FAULT_SHARE, kinds=every_kind(late_s=0.001, retry_after_s=45, long_retry_after_s=240), chance=chance
    )
    with FakeWorkspace(faults=faulty) as workspace:
        os.environ["AIRFLOW_CONN_DATABRICKS_DEFAULT"] = workspace.connection_json
        for number in range(shard, RUNS, SHARDS):
            name = f"run-{number:04d}-of-chaos"
            workspace.default_behaviour = course_of_a_run(chance)
            story = Story(workspace, Fate(f"{SEED}-{number}"), name)
            output, message = story.play()
            found = judge(story, output, message)
            if found:
                played.wrong[name] = found
            played.happened += story.happened
            played.happened["succeeded" if output is not None else "failed"] += 1
            played.submitted += len(workspace.runs)
            workspace.jobs.runs.clear()
            workspace.requests.clear()
    played.faults += faulty.taken
    return played


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_runs_while_everything_goes_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with ProcessPoolExecutor(SHARDS, mp_context=get_context("spawn")) as pool:
        shards = list(pool.map(play, range(SHARDS)))
    happened = sum((shard.happened for shard in shards), Counter())
    taken = sum((shard.faults for shard in shards), Counter())
    wrong = {name: found for shard in shards for name, found in shard.wrong.items()}
    with capsys.disabled():
        submitted = sum(shard.submitted for shard in shards)
        print(f"\n{RUNS} tasks, {submitted} runs; {dict(happened)}; faults: {dict(taken)}; wrong: {len(wrong)}")
    assert wrong == {}
    assert happened["worker killed"] > RUNS / 4
    assert happened["triggerer killed"] > RUNS / 10
    assert happened["cleared while alive"] > 20
