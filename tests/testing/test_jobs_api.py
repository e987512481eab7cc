# SPDX-License-Identifier: Apache-2.0
"""What the Jobs API tells of runs and clusters, and how it ends them, over plain HTTP."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest
from deepspeed_provider.testing.clock import START_MS
from deepspeed_provider.testing.endings import fails, stock_out, succeeds
from deepspeed_provider.testing.workspace import FakeWorkspace

from testing.asking import Asking, refusal, task, without

AN_HOUR_S = 3600.0


def test_a_retried_task_has_an_entry_and_a_run_for_each_attempt(workspace: FakeWorkspace, asking: Asking) -> None:
    workspace.next_run(stock_out(), fails("ValueError: no"), succeeds(logs="done"))
    run_id = asking.submit(task(max_retries=5))
    workspace.advance(AN_HOUR_S)
    entries = asking.run(run_id)["tasks"]
    assert [entry["attempt_number"] for entry in entries] == [0, 1, 2]
    assert [entry["state"]["result_state"] for entry in entries] == ["FAILED", "FAILED", "SUCCESS"]
    assert len({entry["run_id"] for entry in entries}) == 3
    assert len({entry["cluster_instance"]["cluster_id"] for entry in entries}) == 3
    assert [asking.output(entry["run_id"]).get("error") for entry in entries] == [None, "ValueError: no", None]
    assert asking.output(run_id)["logs"] == "done"  # the last attempt of the only task


def test_attempts_keep_their_ids(workspace: FakeWorkspace, asking: Asking) -> None:
    workspace.next_run(fails("no"))
    run_id = asking.submit(task("a", max_retries=2), task("b", depends_on=[{"task_key": "a"}]))
    seen: list[list[int]] = []
    for _ in range(12):
        seen.append([entry["run_id"] for entry in asking.run(run_id)["tasks"] if entry["task_key"] == "a"])
        workspace.advance(300)
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(seen))
    assert len(seen[0]) == 1
    assert len(seen[-1]) == 3


def test_a_blocked_task_has_a_run_already(asking: Asking) -> None:
    run_id = asking.submit(task("a"), task("b", depends_on=[{"task_key": "a"}]))
    blocked = asking.run(run_id)["tasks"][1]
    assert blocked["status"] == {"state": "BLOCKED"}
    assert asking.run(blocked["run_id"])["state"]["life_cycle_state"] == "BLOCKED"
    assert "logs" not in asking.output(blocked["run_id"])


def test_the_output_of_several_tasks_is_asked_for_one_by_one(workspace: FakeWorkspace, asking: Asking) -> None:
    workspace.next_run(of_task={"a": succeeds(logs="of a"), "b": succeeds(logs="of b")})
    run_id = asking.submit(task("a"), task("b"))
    workspace.advance(AN_HOUR_S)
    with pytest.raises(httpx.HTTPStatusError, match="multiple tasks is not supported") as error:
        asking.output(run_id)
    assert refusal(error) == (400, "INVALID_PARAMETER_VALUE")
    entries = asking.run(run_id)["tasks"]
    assert [asking.output(entry["run_id"])["logs"] for entry in entries] == ["of a", "of b"]


def test_there_is_no_output_before_the_end(workspace: FakeWorkspace, asking: Asking) -> None:
    workspace.next_run(fails("ValueError: no", logs="loading"))
    run_id = asking.submit()
    assert set(asking.output(run_id)) == {"metadata"}
    workspace.advance(AN_HOUR_S)
    assert set(asking.output(run_id)) == {"metadata", "error", "error_trace", "logs", "logs_truncated"}


def test_the_cause_lies_in_the_output_of_the_task_only(workspace: FakeWorkspace, asking: Asking) -> None:
    workspace.next_run(fails("ValueError: no such column"))
    run_id = asking.submit()
    workspace.advance(AN_HOUR_S)
    run = asking.run(run_id)
    assert "ValueError" not in str(run)
    assert run["state"]["life_cycle_state"] == "INTERNAL_ERROR"
    assert run["tasks"][0]["state"]["life_cycle_state"] == "TERMINATED"
    assert run["status"]["termination_details"]["code"] == "RUN_EXECUTION_ERROR"
    assert asking.output(run["tasks"][0]["run_id"])["error"] == "ValueError: no such column"


def test_a_cancel_is_answered_at_once_and_takes_its_time(workspace: FakeWorkspace, asking: Asking) -> None:
    run_id = asking.submit()
    workspace.advance(400)
    assert asking.cancel(run_id) == {}
    assert asking.run(run_id)["status"]["state"] == "TERMINATING"
    workspace.advance(30)
    assert asking.run(run_id)["state"] == {
        "life_cycle_state": "TERMINATED",
        "result_state": "CANCELED",
        "state_message": "Run cancelled.",
        "user_cancelled_or_timedout": True,
    }


@pytest.mark.parametrize("ending", [succeeds(), fails("no")], ids=["success", "failure"])
def test_a_run_that_has_ended_keeps_its_outcome_on_a_cancel(
    workspace: FakeWorkspace, asking: Asking, ending: Any
) -> None:
    workspace.next_run(ending)
    run_id = asking.submit()
    workspace.advance(AN_HOUR_S)
    before = asking.run(run_id)
    assert asking.cancel(run_id) == {}
    workspace.advance(AN_HOUR_S)
    assert asking.run(run_id) == before


def test_a_run_cancelled_in_the_queue_never_had_a_cluster(workspace: FakeWorkspace, asking: Asking) -> None:
    workspace.next_run(queue_s=600)
    run_id = asking.submit(queue={"enabled": True})
    assert asking.run(run_id)["status"]["queue_details"]["code"] == "ACTIVE_RUNS_LIMIT_REACHED"
    workspace.advance(60)
    asking.cancel(run_id)
    run = asking.run(run_id)
    assert run["status"]["termination_details"]["code"] == "USER_CANCELED"
    assert "cluster_instance" not in run["tasks"][0]
    assert (run["queue_duration"], run["end_time"] - run["start_time"]) == (60_000, 60_000)


def test_a_full_workspace_without_a_queue_refuses_the_run_but_not_the_request(
    workspace: FakeWorkspace, asking: Asking
) -> None:
    workspace.next_run(queue_s=600)
    run = asking.run(asking.submit())
    assert run["state"]["life_cycle_state"] == "SKIPPED"
    assert run["status"]["termination_details"]["code"] == "WORKSPACE_RUN_LIMIT_EXCEEDED"


def test_an_active_run_is_not_deleted(workspace: FakeWorkspace, asking: Asking) -> None:
    run_id = asking.submit()
    with pytest.raises(httpx.HTTPStatusError, match="still active") as error:
        asking.delete(run_id)
    assert refusal(error) == (400, "INVALID_PARAMETER_VALUE")
    workspace.advance(AN_HOUR_S)
    asking.delete(run_id)
    assert workspace.runs == []


@pytest.mark.parametrize("ask", [Asking.run, Asking.output, Asking.cancel, Asking.delete], ids=lambda ask: ask.__name__)
@pytest.mark.parametrize("run_id", [404, "none"])
def test_an_unknown_run(asking: Asking, ask: Any, run_id: Any) -> None:
    with pytest.raises(httpx.HTTPStatusError) as error:
        ask(asking, run_id)
    assert refusal(error) == (400, "INVALID_PARAMETER_VALUE")


def test_a_forgotten_run_is_unknown(workspace: FakeWorkspace, asking: Asking) -> None:
    run_id = asking.submit(idempotency_token="t")
    workspace.jobs.forget(run_id)
    with pytest.raises(httpx.HTTPStatusError, match="does not exist"):
        asking.run(run_id)
    with pytest.raises(httpx.HTTPStatusError, match="was deleted"):
        asking.submit(idempotency_token="t")


@pytest.fixture
def three_runs(workspace: FakeWorkspace, asking: Asking) -> list[int]:
    """One that ended, one that runs, one whose cluster has just come; 400 s apart."""
    found = []
    for _ in range(3):
        found.append(asking.submit())
        workspace.advance(400)
    return found


@pytest.mark.parametrize(
    ("query", "found"),
    [
        pytest.param({}, [2, 1, 0], id="all, the newest first"),
        pytest.param({"active_only": "true"}, [2, 1], id="active"),
        pytest.param({"completed_only": "true"}, [0], id="completed"),
        pytest.param({"run_type": "SUBMIT_RUN"}, [2, 1, 0], id="submitted"),
        pytest.param({"run_type": "JOB_RUN"}, [], id="of jobs"),
        pytest.param({"start_time_from": START_MS + 400_000}, [2, 1], id="since"),
        pytest.param({"start_time_to": START_MS + 400_000}, [1, 0], id="until"),
        pytest.param({"limit": 2}, [2, 1], id="a page"),
        pytest.param({"limit": 2, "page_token": "from-2"}, [0], id="the next page"),
        pytest.param({"limit": 0}, [2, 1, 0], id="as many as there can be"),
        pytest.param({"job_id": 7}, [], id="of a job"),
    ],
)
def test_runs_are_listed(asking: Asking, three_runs: list[int], query: dict[str, Any], found: list[int]) -> None:
    assert asking.runs(**query) == [three_runs[number] for number in found]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        pytest.param({"active_only": "true", "completed_only": "true"}, "cannot both be true", id="both"),
        pytest.param({"limit": 26}, "limit = 26", id="too many"),
        pytest.param({"limit": -1}, "limit = -1", id="too few"),
        pytest.param({"limit": "all"}, "limit = 'all'", id="no number"),
        pytest.param({"run_type": "MY_RUN"}, "run_type = 'MY_RUN'", id="no type"),
        pytest.param({"page_token": "2"}, "page_token = '2'", id="no token"),
    ],
)
def test_a_wrong_list_is_refused(asking: Asking, query: dict[str, Any], message: str) -> None:
    with pytest.raises(httpx.HTTPStatusError) as error:
        asking.runs(**query)
    assert refusal(error) == (400, "INVALID_PARAMETER_VALUE")
    assert message in error.value.response.json()["message"]


def test_pages_are_20_runs_long_by_itself_and_25_at_most(asking: Asking) -> None:
    for _ in range(30):
        asking.submit()
    assert [len(asking.runs(**query)) for query in ({}, {"limit": 0}, {"limit": 25})] == [20, 25, 25]
    page = asking.get("2.2/jobs/runs/list", page_token="from-20")
    assert (page["has_more"], page["prev_page_token"], "next_page_token" in page) == (False, "from-0", False)


def test_a_hundred_tasks_are_a_page(asking: Asking) -> None:
    run_id = asking.submit(*(task(f"t{number}") for number in range(101)))
    first = asking.run(run_id)
    second = asking.run(run_id, page_token=first["next_page_token"])
    assert (len(first["tasks"]), len(second["tasks"]), "next_page_token" in second) == (100, 1, False)
    assert first["run_id"] == second["run_id"]


def test_a_cluster_that_is_there_already_outlives_the_run(workspace: FakeWorkspace, asking: Asking) -> None:
    workspace.clusters.add("mine")
    run_id = asking.submit({**without("new_cluster"), "existing_cluster_id": "mine"})
    workspace.advance(AN_HOUR_S)
    assert asking.run(run_id)["tasks"][0]["cluster_instance"] == {"cluster_id": "mine"}
    assert asking.get("2.1/clusters/get", cluster_id="mine")["state"] == "RUNNING"
    assert asking.post("2.1/clusters/events", {"cluster_id": "mine"}) == {"events": [], "total_count": 0}


def test_an_unknown_cluster(asking: Asking) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="Cluster nobody does not exist"):
        asking.get("2.1/clusters/get", cluster_id="nobody")
    with pytest.raises(httpx.HTTPStatusError, match="cluster_id = None"):
        asking.post("2.1/clusters/events", {"order": "ASC"})


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        pytest.param({}, ["TERMINATING", "ADD_NODES_FAILED", "CREATING"], id="the newest first"),
        pytest.param({"order": "ASC"}, ["CREATING", "ADD_NODES_FAILED", "TERMINATING"], id="the oldest first"),
        pytest.param({"event_types": ["ADD_NODES_FAILED"]}, ["ADD_NODES_FAILED"], id="of a type"),
        pytest.param({"page_size": 1}, ["TERMINATING"], id="a page"),
        pytest.param({"page_size": 10_000}, ["TERMINATING", "ADD_NODES_FAILED", "CREATING"], id="a huge page"),
        pytest.param({"page_size": 2, "page_token": "from-2"}, ["CREATING"], id="the next page"),
        pytest.param({"end_time": START_MS}, ["CREATING"], id="until"),
        pytest.param({"start_time": START_MS + 1}, ["TERMINATING", "ADD_NODES_FAILED"], id="since"),
    ],
)
def test_the_events_of_a_cluster(
    workspace: FakeWorkspace, asking: Asking, asked: dict[str, Any], kinds: list[str]
) -> None:
    workspace.next_run(stock_out())
    run_id = asking.submit()
    workspace.advance(AN_HOUR_S)
    cluster_id = asking.run(run_id)["tasks"][0]["cluster_instance"]["cluster_id"]
    found = asking.post("2.1/clusters/events", {"cluster_id": cluster_id, **asked})
    assert [event["type"] for event in found["events"]] == kinds


def test_it_is_told_once_what_has_ended() -> None:
    told: list[tuple[str, int, str]] = []
    fake = FakeWorkspace(ended=lambda run, key, attempt: told.append((key, attempt.number, attempt.ending.code)))
    with fake, Asking(fake) as asking:
        fake.next_run(fails("no"), succeeds())
        run_id = asking.submit(task(max_retries=1))
        for _ in range(30):
            asking.run(run_id)
            fake.advance(120)
    assert told == [("train", 0, "RUN_EXECUTION_ERROR"), ("train", 1, "SUCCESS")]


def test_a_number_of_runs_is_scripted_in_their_order(workspace: FakeWorkspace, asking: Asking) -> None:
    workspace.next_run(fails("no"))
    workspace.next_run(stock_out())
    run_ids = [asking.submit() for _ in range(3)]
    workspace.advance(AN_HOUR_S)
    codes = [asking.run(run_id)["status"]["termination_details"]["code"] for run_id in run_ids]
    assert codes == ["RUN_EXECUTION_ERROR", "CLOUD_FAILURE", "SUCCESS"]
