# SPDX-License-Identifier: Apache-2.0
"""What the Databricks provider's operator (7.23) does in blocking mode, reproduced against the fake workspace."""

from __future__ import annotations

import pytest
from airflow.exceptions import AirflowException
from airflow.providers.databricks.exceptions import DatabricksApiError
from deepspeed_provider.testing.faults import lost_response, refused_token
from deepspeed_provider.testing.timeline import Phase
from deepspeed_provider.testing.workspace import FakeWorkspace
from operators.fake_task import Crash

from testing.databricks_provider.task import (
    GET,
    SUBMIT,
    DatabricksTask,
    assert_left_running,
    cancels,
    die,
    phase,
    running,
    submits,
)

MID_POLL = 4  # which call of a first try is its second poll, after submit, the page and a poll
DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("token", "runs"), [pytest.param(None, 2, id="B-no_token"), pytest.param("token", 1, id="B2-token")]
)
def test_an_answer_lost_after_the_submit(token: str | None, runs: int, workspace: FakeWorkspace) -> None:
    workspace.fault(lost_response(), path=SUBMIT)
    task = DatabricksTask(options={"idempotency_token": token})
    task.execute()
    assert submits(workspace) == 2
    assert len(workspace.runs) == runs
    assert task.stored_run_id == workspace.runs[-1].run_id
    assert cancels(workspace) == 0


def test_one_dropped_connection_is_asked_again_about(workspace: FakeWorkspace) -> None:
    task = DatabricksTask()
    workspace.fault(lost_response(), path=GET, skip=task.looks_before_second_poll)
    task.execute()
    assert task.pauses == [1.0]
    assert submits(workspace) == 1


def test_d_an_expired_token_fails_the_task_at_once(workspace: FakeWorkspace) -> None:
    running(workspace)
    task = DatabricksTask(at_call={MID_POLL: workspace.tokens.clear})
    with pytest.raises(DatabricksApiError, match="Invalid access token"):
        task.execute()
    assert task.pauses == []
    assert_left_running(workspace)


def killed_mid_poll(workspace: FakeWorkspace) -> DatabricksTask:
    """A task whose worker was lost while the run went on."""
    running(workspace)
    task = DatabricksTask(at_call={MID_POLL: die})
    with pytest.raises(Crash):
        task.execute()
    assert_left_running(workspace)
    return task


def terminated_mid_poll(workspace: FakeWorkspace) -> DatabricksTask:
    """A task whose worker was asked to go, which cancels the run."""
    running(workspace, stop_s=300)
    task = DatabricksTask()
    task.at_call[MID_POLL] = task.terminate
    with pytest.raises(Crash):
        task.execute()
    assert cancels(workspace) == 1
    assert phase(workspace) is Phase.TERMINATING
    return task


def test_f1_a_retry_after_a_lost_worker_attaches(workspace: FakeWorkspace) -> None:
    task = killed_mid_poll(workspace)
    task.execute()
    assert submits(workspace) == 1
    assert phase(workspace) is Phase.ENDED


def test_f2_a_retry_finds_the_success_meanwhile(workspace: FakeWorkspace) -> None:
    task = killed_mid_poll(workspace)
    workspace.advance(DAY_S)
    task.execute()
    assert submits(workspace) == 1


def test_f3_clearing_a_success_runs_nothing(workspace: FakeWorkspace) -> None:
    task = DatabricksTask()
    task.execute()
    looks = len(workspace.requests)
    task.execute()
    assert submits(workspace) == 1
    assert [each.path for each in workspace.requests[looks:]] == [GET, GET]  # its state, and its page for the XCom


def test_f4_a_retry_attaches_to_the_dying_run_and_fails_with_it(workspace: FakeWorkspace) -> None:
    task = terminated_mid_poll(workspace)
    with pytest.raises(AirflowException, match="CANCELED"):
        task.execute()
    assert submits(workspace) == 1


def test_f5_a_retry_after_the_cancel_has_settled_submits_anew(workspace: FakeWorkspace) -> None:
    task = terminated_mid_poll(workspace)
    workspace.advance(DAY_S)
    task.execute()
    assert [run.cancels for run in workspace.runs] == [1, 0]
    assert task.stored_run_id == workspace.runs[1].run_id


def test_f6_without_durability_a_retry_submits_beside_the_live_run(workspace: FakeWorkspace) -> None:
    running(workspace, run_s=DAY_S)
    task = DatabricksTask(options={"durable": False}, at_call={MID_POLL: die})
    with pytest.raises(Crash):
        task.execute()
    task.execute()
    assert len(workspace.runs) == submits(workspace) == 2
    assert [phase(workspace, 0), phase(workspace, 1)] == [Phase.RUNNING, Phase.ENDED]
    assert task.stored_run_id is None


def test_f8_a_store_that_fails_after_the_submit_leaves_the_run(workspace: FakeWorkspace) -> None:
    def refuse(*_: str) -> None:
        raise OSError("the API server is away")

    running(workspace)
    task = DatabricksTask()
    task.store.on_call = refuse
    with pytest.raises(OSError, match="the API server is away"):
        task.execute()
    assert_left_running(workspace)
    assert task.stored_run_id is None


def test_f10_a_refusal_on_attaching_fails_the_retry_too(workspace: FakeWorkspace) -> None:
    task = killed_mid_poll(workspace)
    workspace.fault(refused_token(), path=GET)
    with pytest.raises(DatabricksApiError):
        task.execute()
    assert_left_running(workspace)
