# SPDX-License-Identifier: Apache-2.0
"""One poller for all runs of a workspace: few requests, no answer later than asked for, and nothing that ends it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from deepspeed_provider.backends.base import BackendUnavailable, RunState, RunStatus
from deepspeed_provider.hooks.databricks import DatabricksWorkspaceHook
from deepspeed_provider.testing import endings, faults
from deepspeed_provider.testing.workspace import FakeWorkspace
from deepspeed_provider.triggers.workspace_poller import (
    LONGEST_PAUSE_S,
    PROGRESS_A_ROUND,
    WorkspacePoller,
    shared_poller,
)

INTERVAL_S = 30.0
CLUSTER = {"spark_version": "16.4.x-gpu-ml-scala2.12", "node_type_id": "g5.xlarge", "num_workers": 0}


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Any:
    with FakeWorkspace() as found:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", found.connection_json)
        yield found


def submit(workspace: FakeWorkspace, count: int, **course: Any) -> list[str]:
    task = {"task_key": "t", "new_cluster": CLUSTER, "spark_python_task": {"python_file": "/Workspace/x.py"}}
    ids = []
    for _ in range(count):
        workspace.next_run(*course.pop("endings", ()), **{"run_s": 1e6, "start_s": 0.0, **course})
        ids.append(str(workspace.jobs.submit({"tasks": [task]})["run_id"]))
    return ids


class Watch:
    """A poller whose pauses let virtual time pass, and are kept."""

    def __init__(self, workspace: FakeWorkspace) -> None:
        self.workspace = workspace
        self.pauses_s: list[float] = []
        self.round_s = 0.0
        self._looked_at_s = 0.0
        hook = DatabricksWorkspaceHook(attempts=1)
        self.poller = WorkspacePoller(hook, sleep=self.sleep, clock=self.clock, jitter=lambda: 0.0)

    def clock(self) -> float:
        """Looked at before and after each round."""
        self._looked_at_s += self.round_s
        return self._looked_at_s

    async def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.workspace.advance(seconds)
        await asyncio.sleep(0)

    async def wait(self, run_id: str, rounds: int) -> list[RunStatus | BackendUnavailable]:
        """What somebody who waits for one run is told."""
        told: list[RunStatus | BackendUnavailable] = []
        while len(told) < rounds:
            try:
                told.append(await self.poller.status(run_id, INTERVAL_S))
            except BackendUnavailable as error:
                told.append(error)
        return told

    def rounds(self, run_ids: list[str], rounds: int) -> dict[str, list[Any]]:
        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(self.wait(run_id, rounds) for run_id in run_ids))

        return dict(zip(run_ids, asyncio.run(all_of_them()), strict=True))

    @property
    def asked(self) -> Counter[str]:
        return Counter(request.path for request in self.workspace.requests)


# (length of a round in seconds, pause after it)
PAUSES = {"no time": (0.0, 30.0), "a little": (0.5, 28.5), "long": (4.0, 18.0), "longer than the pause": (60.0, 15.0)}


@pytest.mark.parametrize(("round_s", "pause_s"), PAUSES.values(), ids=PAUSES)
def test_rounds_begin_earlier_by_the_age_of_what_they_tell(
    workspace: FakeWorkspace, round_s: float, pause_s: float
) -> None:
    watch = Watch(workspace)
    watch.round_s = round_s
    watch.rounds(submit(workspace, 1), 3)
    assert watch.pauses_s == [INTERVAL_S, pause_s, pause_s]


def test_a_refused_round_shortens_no_pause(workspace: FakeWorkspace) -> None:
    watch = Watch(workspace)
    watch.round_s = 4.0
    run_ids = submit(workspace, 1)
    workspace.fault(faults.too_many_requests(77))
    watch.rounds(run_ids, 2)
    assert watch.pauses_s == [INTERVAL_S, 77.0]


# (own runs, runs of others, rounds, requests that are allowed in all)
COSTS = {
    "a run alone": (1, 0, 4, 4),
    "a few among many of others": (3, 500, 10, 36),
    "a few alone": (3, 0, 4, 4),
    "many alone, eight pages": (200, 0, 3, 24),
    "many among a few of others": (100, 50, 3, 18),
}


@pytest.mark.parametrize(("own", "others", "rounds", "requests"), COSTS.values(), ids=COSTS)
def test_a_round_costs_no_more_than_the_cheaper_way(
    workspace: FakeWorkspace, own: int, others: int, rounds: int, requests: int
) -> None:
    first = submit(workspace, own)
    submit(workspace, others)
    watch = Watch(workspace)
    told = watch.rounds(first, rounds)
    assert all(status.state is RunState.RUNNING for status in told[first[0]][-2:])
    assert sum(watch.asked.values()) <= requests
    assert watch.pauses_s == [INTERVAL_S] * rounds, "one round for all, as often as each wants it"


def test_listing_is_tried_again_when_the_others_have_gone(workspace: FakeWorkspace) -> None:
    own = submit(workspace, 4)
    others = submit(workspace, 100)
    watch = Watch(workspace)
    watch.rounds(own, 4)
    for run_id in others:
        workspace.jobs.forget(int(run_id))
    before = watch.asked["jobs/runs/get"]
    watch.rounds(own, 40)
    assert watch.asked["jobs/runs/get"] - before < 40, "far from four in each round"


def test_ends_are_told_by_the_next_round(workspace: FakeWorkspace) -> None:
    ending = submit(workspace, 1, run_s=60.0, start_s=0.0, stop_s=0.0)
    failing = submit(workspace, 1, run_s=60.0, start_s=0.0, stop_s=0.0, endings=(endings.fails("ValueError: x"),))
    going_on = submit(workspace, 8)
    told = Watch(workspace).rounds([*ending, *failing, *going_on], 2)
    assert [status.state for status in told[ending[0]]] == [RunState.RUNNING, RunState.SUCCEEDED]
    assert [status.state for status in told[failing[0]]] == [RunState.RUNNING, RunState.FAILED]
    assert {status.state for status in told[going_on[0]]} <= {RunState.PENDING, RunState.RUNNING}


def test_a_run_that_is_gone_is_unseen_and_its_neighbours_are_not(workspace: FakeWorkspace) -> None:
    first, second = submit(workspace, 2)
    workspace.jobs.forget(int(first))
    told = Watch(workspace).rounds([first, second], 1)
    assert [told[each][0].state for each in (first, second)] == [RunState.UNSEEN, RunState.RUNNING]


NO_ANSWERS: dict[str, faults.Fault] = {
    "429 that says when": faults.too_many_requests(77),
    "429 that does not": faults.too_many_requests(None),
    "503": faults.server_error(503),
    "a dropped connection": faults.reset_connection(),
    "a refused token": faults.refused_token(401),
}


@pytest.mark.parametrize("fault", NO_ANSWERS.values(), ids=NO_ANSWERS)
def test_no_answer_is_told_and_asked_for_later(workspace: FakeWorkspace, fault: faults.Fault) -> None:
    (run_id,) = submit(workspace, 1)
    watch = Watch(workspace)
    workspace.fault(fault, times=6)
    told = watch.rounds([run_id], 12)[run_id]
    kinds = [isinstance(each, BackendUnavailable) for each in told]
    assert any(kinds)
    assert not kinds[-1], "and then there was one"
    assert kinds == sorted(kinds, reverse=True)
    assert max(watch.pauses_s) > INTERVAL_S, "longer and longer"
    assert watch.pauses_s[-1] == INTERVAL_S, "and as before after an answer"


def test_the_workspace_says_for_how_long(workspace: FakeWorkspace) -> None:
    (run_id,) = submit(workspace, 1)
    watch = Watch(workspace)
    workspace.fault(faults.too_many_requests(200))
    watch.rounds([run_id], 3)
    assert watch.pauses_s == [INTERVAL_S, 200.0, INTERVAL_S]


def test_an_outage_of_weeks_is_sat_out(workspace: FakeWorkspace) -> None:
    (run_id,) = submit(workspace, 1)
    watch = Watch(workspace)
    workspace.stop()
    told = watch.rounds([run_id], 1100)[run_id]
    assert all(isinstance(each, BackendUnavailable) for each in told)
    assert watch.pauses_s[-1] == LONGEST_PAUSE_S


def test_who_comes_later_and_who_leaves(workspace: FakeWorkspace) -> None:
    first, second = submit(workspace, 2)
    watch = Watch(workspace)

    async def come_and_go() -> list[Any]:
        leaving = asyncio.create_task(watch.wait(first, 100))
        await watch.wait(second, 2)
        leaving.cancel()
        after = await watch.wait(second, 2)
        idle = len(workspace.requests)
        await asyncio.sleep(0.05)
        assert len(workspace.requests) == idle, "nobody waits, nobody asks"
        return [*after, *await watch.wait(first, 1)]

    assert len(asyncio.run(come_and_go())) == 3


def test_progress_is_read_in_turn(workspace: FakeWorkspace) -> None:
    own = submit(workspace, 7)
    watch = Watch(workspace)
    turns: list[set[str]] = []

    async def one(run_id: str) -> None:
        for number in range(4):
            await watch.poller.status(run_id, INTERVAL_S)
            if len(turns) == number:
                turns.append({each for each in own if watch.poller.may_read_progress(each)})

    async def all_of_them() -> None:
        await asyncio.gather(*map(one, own))

    asyncio.run(all_of_them())
    assert all(len(turn) <= PROGRESS_A_ROUND for turn in turns)
    assert set.union(*turns) == set(own), "everybody has had a turn"


def test_a_poller_belongs_to_its_event_loop(workspace: FakeWorkspace) -> None:
    async def ask() -> WorkspacePoller:
        assert shared_poller("databricks_default") is shared_poller("databricks_default")
        assert shared_poller("databricks_default") is not shared_poller("another")
        return shared_poller("databricks_default")

    assert asyncio.run(ask()) is not asyncio.run(ask())
