# SPDX-License-Identifier: Apache-2.0
"""The course of a run: only steps that somebody vouches for, forwards only, and an end that stays."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
from deepspeed_provider.testing.endings import (
    Ending,
    fails,
    host_killed,
    internal_error,
    library_failure,
    out_of_gpu_memory,
    spot_loss,
    stock_out,
    succeeds,
    succeeds_with_failures,
)
from deepspeed_provider.testing.timeline import (
    FIRST,
    TRANSITIONS,
    Behaviour,
    Course,
    Order,
    Phase,
    TaskOrder,
    course,
)
from deepspeed_provider.testing.workspace import behaviour
from hypothesis import given, settings
from hypothesis import strategies as st

ENDINGS = [
    succeeds(),
    succeeds_with_failures(),
    fails("ValueError: no"),
    out_of_gpu_memory(ranks=8),
    host_killed(),
    library_failure(),
    stock_out(),
    spot_loss(),
    internal_error(),
]


@dataclass(frozen=True)
class Scenario:
    """A run in a world where everything takes a few milliseconds; ``cancel_ms`` after it was submitted."""

    order: Order
    behaviour: Behaviour
    cancel_ms: int | None

    def at(self, now_ms: int) -> Course:
        """As it looks then: of a cancel to come, nothing is known yet."""
        if self.cancel_ms is None or now_ms < self.cancel_ms or not self.alive_when_cancelled:
            return self.uncancelled(now_ms)
        return course(replace(self.order, cancelled_ms=self.cancel_ms), self.behaviour, now_ms)

    def uncancelled(self, now_ms: int) -> Course:
        return course(self.order, self.behaviour, now_ms)

    @cached_property
    def alive_when_cancelled(self) -> bool:
        assert self.cancel_ms is not None
        return self.uncancelled(self.cancel_ms).phase is not Phase.ENDED

    @cached_property
    def film(self) -> list[tuple[int, Course]]:
        """Every millisecond until its end, that of the cancel from before and after it, and a long time afterwards."""
        shown = []
        for now_ms in range(5000):
            if now_ms == self.cancel_ms:
                shown.append((now_ms, self.uncancelled(now_ms)))
            shown.append((now_ms, self.at(now_ms)))
            if shown[-1][1].phase is Phase.ENDED:
                return [*shown, *((later, self.at(later)) for later in (now_ms + 1, now_ms + 7, 10_000))]
        raise AssertionError("it never ends")


some_ms = st.integers(1, 4)


@st.composite
def scenarios(draw: st.DrawFn, *, cancelled: bool | None = None) -> Scenario:
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    tasks = tuple(
        TaskOrder(
            key=name,
            depends_on=tuple(draw(st.lists(st.sampled_from(names[:number]), unique=True)) if number else ()),
            max_retries=draw(st.integers(0, 2)),
            retry_interval_ms=draw(st.sampled_from([0, 3, 12])),
            retry_on_timeout=draw(st.booleans()),
            timeout_ms=draw(st.one_of(st.just(0), some_ms)),
        )
        for number, name in enumerate(names)
    )
    endings = st.lists(st.sampled_from(ENDINGS), min_size=1, max_size=3).map(tuple)
    order = Order(
        submitted_ms=0,
        tasks=tasks,
        queue_enabled=draw(st.booleans()),
        timeout_ms=draw(st.one_of(st.just(0), st.integers(1, 30))),
    )
    script = Behaviour(
        endings=draw(endings),
        of_task=draw(st.dictionaries(st.sampled_from(names), endings)),
        queue_s=draw(st.one_of(st.just(0), some_ms)) / 1000,
        start_s=draw(some_ms) / 1000,
        run_s=draw(some_ms) / 1000,
        stop_s=draw(some_ms) / 1000,
    )
    when = st.integers(0, 30)
    chosen = {None: st.one_of(st.none(), when), True: when, False: st.none()}[cancelled]
    return Scenario(order=order, behaviour=script, cancel_ms=draw(chosen))


def phases(scenario: Scenario) -> dict[str, list[Phase]]:
    """Of the run, of each task and of each attempt, over time."""
    found: dict[str, list[Phase]] = {}
    for now_ms, shown in scenario.film:
        found.setdefault("run", []).append(shown.phase)
        for task in shown.tasks:
            found.setdefault(task.key, []).append(task.phase)
            for attempt in task.attempts:
                found.setdefault(f"{task.key}, attempt {attempt.number}", []).append(attempt.phase(now_ms))
    return found


def steps(of: list[Phase]) -> set[tuple[Phase, Phase]]:
    return {(before, after) for before, after in itertools.pairwise(of) if before is not after}


@given(scenarios())
def test_only_steps_with_a_source_happen(scenario: Scenario) -> None:
    for name, of in phases(scenario).items():
        assert of[0] in FIRST, name
        # A run that is overdue just between two of its tasks has nothing to stop.
        between = {(Phase.RUNNING, Phase.ENDED)} if name == "run" and scenario.order.timeout_ms else set()
        assert steps(of) <= set(TRANSITIONS) | between, name
        assert of[-1] is Phase.ENDED, name


def test_every_step_with_a_source_happens() -> None:
    """The table names nothing that cannot be seen."""
    seen: set[tuple[Phase, Phase]] = set()

    @settings(max_examples=300, derandomize=True)
    @given(scenarios())
    def collect(scenario: Scenario) -> None:
        for of in phases(scenario).values():
            seen.update(steps(of))

    collect()
    assert seen == set(TRANSITIONS)


@given(scenarios())
def test_what_has_ended_stays_as_it_is(scenario: Scenario) -> None:
    whole = [shown for _, shown in scenario.film if shown.phase is Phase.ENDED]
    assert whole == [whole[0]] * len(whole)
    for number in range(len(scenario.order.tasks)):
        ended = [shown.tasks[number] for _, shown in scenario.film if shown.tasks[number].phase is Phase.ENDED]
        assert ended == [ended[0]] * len(ended)


@given(scenarios())
def test_attempts_are_added_and_their_past_is_not_changed(scenario: Scenario) -> None:
    for (_, before), (now_ms, after) in itertools.pairwise(scenario.film):
        for old, new in zip(before.tasks, after.tasks, strict=True):
            assert len(old.attempts) <= len(new.attempts) <= len(old.attempts) + 1
            assert [attempt.number for attempt in new.attempts] == list(range(len(new.attempts)))
            for attempt, same in zip(old.attempts, new.attempts, strict=False):
                assert attempt == same or attempt.ends_ms > now_ms >= attempt.begins_ms == same.begins_ms


@given(scenarios())
def test_a_run_has_an_ending_from_its_end_on(scenario: Scenario) -> None:
    ended_ms = next(now_ms for now_ms, shown in scenario.film if shown.phase is Phase.ENDED)
    for now_ms, shown in scenario.film:
        assert (shown.ending is not None) == (now_ms >= ended_ms) or now_ms == scenario.cancel_ms
        assert shown.ended_ms == (None if shown.ending is None else ended_ms)
    assert all(task.ending is not None for task in scenario.film[-1][1].tasks)


@given(scenarios(cancelled=True))
def test_a_cancelled_run_ends_within_its_stop_time(scenario: Scenario) -> None:
    assert scenario.cancel_ms is not None
    if not scenario.alive_when_cancelled:
        assert scenario.at(10_000) == scenario.uncancelled(10_000)
        return
    end = scenario.at(scenario.cancel_ms + round(1000 * scenario.behaviour.stop_s))
    assert end.phase is Phase.ENDED
    assert all(attempt.begins_ms <= scenario.cancel_ms for task in end.tasks for attempt in task.attempts)


@given(scenarios(cancelled=True))
def test_code_that_had_ended_keeps_its_outcome_on_a_cancel(scenario: Scenario) -> None:
    assert scenario.cancel_ms is not None
    before = scenario.uncancelled(scenario.cancel_ms)
    after = scenario.at(10_000)
    for old, new in zip(before.tasks, after.tasks, strict=True):
        if old.ending is not None:
            assert new.ending == old.ending
        for attempt, kept in zip(old.attempts, new.attempts, strict=False):
            if attempt.ends_ms <= scenario.cancel_ms:
                assert kept == attempt


@given(scenarios())
def test_a_task_starts_after_all_that_it_depends_on_have_succeeded(scenario: Scenario) -> None:
    last = scenario.film[-1][1]
    tasks = {task.key: task for task in last.tasks}
    for order in scenario.order.tasks:
        upstream = [tasks[key] for key in order.depends_on]
        if tasks[order.key].attempts:
            assert all(each.ending is not None and each.ending.succeeded for each in upstream)
            assert all(each.ended_ms <= tasks[order.key].attempts[0].begins_ms for each in upstream)


@given(scenarios(cancelled=False))
def test_a_retry_comes_only_where_it_was_asked_for(scenario: Scenario) -> None:
    last = scenario.film[-1][1]
    for order, task in zip(scenario.order.tasks, last.tasks, strict=True):
        assert len(task.attempts) <= order.max_retries + 1
        for attempt, following in itertools.pairwise(task.attempts):
            assert attempt.ending.counts_as_failed or order.retry_on_timeout
            assert following.begins_ms >= attempt.gone_ms
            assert following.begins_ms >= attempt.pending_ms + order.retry_interval_ms


def one(*endings: Ending, cancelled_ms: int | None = None, timeout_ms: int = 0, task: Any = None, **script: Any) -> Any:
    """A run with a single task, a second for each phase, half an hour later."""
    order = Order(
        submitted_ms=0,
        tasks=(TaskOrder(key="train", **(task or {})),),
        queue_enabled=True,
        timeout_ms=timeout_ms,
        cancelled_ms=cancelled_ms,
    )
    script = {"queue_s": 1.0, "start_s": 1.0, "run_s": 1.0, "stop_s": 1.0, **script}
    return course(order, behaviour(*endings, **script), 1_800_000)


@pytest.mark.parametrize(
    ("given_", "code", "ended_ms"),
    [
        pytest.param({}, "SUCCESS", 4000, id="by itself"),
        pytest.param({"cancelled_ms": 500}, "USER_CANCELED", 500, id="cancelled in the queue"),
        pytest.param({"cancelled_ms": 1500}, "USER_CANCELED", 2500, id="cancelled while its cluster starts"),
        pytest.param({"cancelled_ms": 2500}, "USER_CANCELED", 3500, id="cancelled while it runs"),
        pytest.param({"cancelled_ms": 3500}, "SUCCESS", 4000, id="cancelled when its code had ended"),
        pytest.param({"timeout_ms": 1500}, "CANCELED", 3500, id="the run's limit"),
        pytest.param({"task": {"timeout_ms": 1500}}, "CANCELED", 3500, id="the task's limit"),
        pytest.param({"timeout_ms": 1500, "cancelled_ms": 2400}, "USER_CANCELED", 3400, id="cancelled before it"),
        pytest.param({"timeout_ms": 1500, "cancelled_ms": 2600}, "CANCELED", 3500, id="cancelled after it"),
    ],
)
def test_what_ends_a_run_first_decides(given_: dict[str, Any], code: str, ended_ms: int) -> None:
    found = one(**given_)
    assert (found.ending.code, found.ended_ms) == (code, ended_ms)


@pytest.mark.parametrize(
    ("endings", "task", "codes"),
    [
        pytest.param([fails("no"), succeeds()], {"max_retries": 3}, ["RUN_EXECUTION_ERROR", "SUCCESS"], id="cured"),
        pytest.param([fails("no")], {"max_retries": 2}, ["RUN_EXECUTION_ERROR"] * 3, id="exhausted"),
        pytest.param([fails("no")], {}, ["RUN_EXECUTION_ERROR"], id="none by itself"),
        pytest.param(
            [stock_out(), stock_out(), succeeds()],
            {"max_retries": -1},
            ["CLOUD_FAILURE", "CLOUD_FAILURE", "SUCCESS"],
            id="as often as it takes",
        ),
        pytest.param([succeeds_with_failures()], {"max_retries": 2}, ["SUCCESS_WITH_FAILURES"], id="half a success"),
        pytest.param([succeeds()], {"max_retries": 2, "timeout_ms": 500}, ["CANCELED"], id="no retry of a time-out"),
        pytest.param(
            [succeeds()],
            {"max_retries": 2, "timeout_ms": 500, "retry_on_timeout": True},
            ["CANCELED"] * 3,
            id="retries of a time-out",
        ),
    ],
)
def test_retries(endings: list[Ending], task: dict[str, Any], codes: list[str]) -> None:
    [train] = one(*endings, task=task).tasks
    assert [attempt.ending.code for attempt in train.attempts] == codes


def test_retries_without_end_and_without_any_time_between_come_to_now() -> None:
    nothing = dict.fromkeys(("queue_s", "start_s", "run_s", "stop_s"), 0.0)
    assert one(stock_out(), task={"max_retries": -1, "retry_interval_ms": 60_000}, **nothing).phase is not Phase.ENDED
    order = Order(submitted_ms=0, tasks=(TaskOrder(key="train", max_retries=-1),))
    assert len(course(order, behaviour(stock_out(), **nothing), 100).tasks[0].attempts) == 101


def test_a_full_workspace_refuses_a_run_that_brings_no_queue() -> None:
    order = Order(submitted_ms=5, tasks=(TaskOrder(key="train"),))
    refused = course(order, behaviour(queue_s=60.0), 5)
    assert refused.phase is Phase.ENDED
    assert refused.ending is not None
    assert (refused.ending.code, refused.ended_ms) == ("WORKSPACE_RUN_LIMIT_EXCEEDED", 5)


def two(upstream: Ending, now_ms: int, **order: Any) -> Course:
    """Two tasks in a row, a second for each phase."""
    tasks = (TaskOrder(key="prepare"), TaskOrder(key="train", depends_on=("prepare",)))
    script = behaviour(of_task={"prepare": upstream}, start_s=1.0, run_s=1.0, stop_s=1.0)
    return course(Order(submitted_ms=0, tasks=tasks, **order), script, now_ms)


@pytest.mark.parametrize(
    ("upstream", "order", "result", "of_run"),
    [
        pytest.param(succeeds(), {}, "SUCCESS", "SUCCESS", id="after a success"),
        pytest.param(succeeds_with_failures(), {}, "SUCCESS", "SUCCESS_WITH_FAILURES", id="after half a success"),
        pytest.param(fails("no"), {}, "UPSTREAM_FAILED", "FAILED", id="after a failure"),
        pytest.param(stock_out(), {}, "UPSTREAM_FAILED", "FAILED", id="after one that never started"),
        pytest.param(succeeds(), {"cancelled_ms": 1500}, "UPSTREAM_CANCELED", "CANCELED", id="after a cancel"),
        pytest.param(succeeds(), {"cancelled_ms": 2500}, "CANCELED", "CANCELED", id="cancelled before it began"),
        pytest.param(succeeds(), {"cancelled_ms": 3500}, "CANCELED", "CANCELED", id="cancelled while it starts"),
        pytest.param(succeeds(), {"timeout_ms": 4500}, "TIMEDOUT", "TIMEDOUT", id="out of time"),
    ],
)
def test_a_task_after_another(upstream: Ending, order: dict[str, int], result: str, of_run: str) -> None:
    end = two(upstream, 60_000, **order)
    assert end.tasks[1].ending is not None
    assert end.ending is not None
    assert (end.tasks[1].ending.result_state, end.ending.result_state) == (result, of_run)


def test_a_run_of_several_tasks_is_running_from_its_first_code_to_its_last() -> None:
    phases = [two(succeeds(), now_ms).phase for now_ms in range(500, 7000, 1000)]
    assert phases == ["PENDING", *["RUNNING"] * 4, "TERMINATING", "ENDED"]
