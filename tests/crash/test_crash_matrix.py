"""A real ``airflow standalone`` whose processes are killed, whose tasks are cleared and marked.

Most of a scenario is waiting, so those that leave the services alone run side by side in one Airflow, and each is a
test of its own that reports how its scenario went. One row: ``pytest tests/crash -m slow -k "databricks and restart"``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from crash.conftest import SIDE_BY_SIDE, Grounds
from crash.places import left_by_runs
from crash.scenarios import BOTH, SCENARIOS
from crash.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def outcomes(grounds: Grounds, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[None]]]:
    """What became of each scenario that a test asks for, all of them under way."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.function is test_side_by_side]
    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    try:
        yield {
            name: pool.submit(each.play, grounds.places[each.place])
            for name, each in SCENARIOS.items()
            if name in wanted
        }
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_side_by_side(outcomes: dict[str, Future[None]], name: str) -> None:
    outcomes[name].result()


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda stack: stack.replace_triggerer(signal.SIGTERM), id="triggerer restarted"),
        pytest.param(lambda stack: stack.replace_triggerer(signal.SIGKILL), id="triggerer killed"),
        pytest.param(lambda stack: stack.kill_scheduler(), id="scheduler killed"),
    ],
)
def test_gone_while_deferred(grounds: Grounds, end: Callable[[Stack], None]) -> None:
    places = [grounds.places[name] for name in BOTH]
    runs = [place.trigger("deferred", seconds=20) for place in places]
    for run in runs:
        run.wait_for_ranks()
        run.wait_for_task("deferred")
    end(grounds.stack)
    for place, run in zip(places, runs, strict=True):
        run.end()
        place.require_runs(run, 1)
        assert run.result()["generation"] == 1


def test_every_process_is_gone_with_the_stack(grounds: Grounds) -> None:
    """Nothing that a scenario started is left on the clusters while Airflow still stands."""
    assert left_by_runs(grounds.stack.folder) == []
