# SPDX-License-Identifier: Apache-2.0
"""What the Databricks provider's operator and trigger (7.23) do in deferrable mode, against the fake workspace."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from airflow.exceptions import AirflowException
from airflow.providers.databricks.exceptions import DatabricksApiError
from airflow.providers.databricks.triggers.databricks import DatabricksExecutionTrigger
from deepspeed_provider.testing.faults import lost_request, server_error
from deepspeed_provider.testing.timeline import Phase
from deepspeed_provider.testing.workspace import FakeWorkspace

from testing.databricks_provider.task import (
    CANCEL,
    GET,
    DatabricksTask,
    assert_left_running,
    cancels,
    in_triggerer,
    phase,
    running,
    submits,
    watch,
)


@pytest.fixture
def task() -> DatabricksTask:
    return DatabricksTask(options={"deferrable": True})


def deferred_trigger(task: DatabricksTask, workspace: FakeWorkspace) -> DatabricksExecutionTrigger:
    """The trigger of a run that is running."""
    running(workspace)
    return in_triggerer(task.defer(), task.pauses)


def test_it_defers_without_a_deadline(task: DatabricksTask, workspace: FakeWorkspace) -> None:
    task.options["execution_timeout"] = timedelta(hours=1)
    assert task.defer().timeout is None


def test_g1_a_retry_submits_beside_the_live_run(task: DatabricksTask, workspace: FakeWorkspace) -> None:
    task.defer()
    task.defer()
    assert len(workspace.runs) == submits(workspace) == 2
    assert Phase.ENDED not in (phase(workspace, 0), phase(workspace, 1))
    assert task.store.values == {}


def test_g3_after_an_expired_token_the_retry_pays_twice(task: DatabricksTask, workspace: FakeWorkspace) -> None:
    trigger = deferred_trigger(task, workspace)
    token = workspace.tokens.pop()
    with pytest.raises(DatabricksApiError):
        watch(trigger)
    assert_left_running(workspace)
    workspace.tokens.add(token)
    task.defer()
    assert len(workspace.runs) == 2


def test_g5_a_persons_action_cancels_and_does_not_wait(task: DatabricksTask, workspace: FakeWorkspace) -> None:
    trigger = deferred_trigger(task, workspace)
    asyncio.run(trigger.on_kill())
    assert cancels(workspace) == workspace.runs[0].cancels == 1
    assert phase(workspace) is Phase.TERMINATING


def test_g6_a_cancel_that_is_not_accepted_leaves_the_run(task: DatabricksTask, workspace: FakeWorkspace) -> None:
    trigger = deferred_trigger(task, workspace)
    workspace.fault(server_error(503), path=CANCEL, times=3)
    # The triggerer only warns of what comes out of on_kill.
    with pytest.raises(AirflowException, match="failed 3 times"):
        asyncio.run(trigger.on_kill())
    assert [request.status for request in workspace.requests_for(CANCEL)] == [503, 503, 503]
    assert task.pauses == [1.0, 2.0]
    assert workspace.runs[0].cancels == 0
    assert phase(workspace) is Phase.RUNNING


def test_g7_one_dropped_connection_is_survived_by_aiohttp(task: DatabricksTask, workspace: FakeWorkspace) -> None:
    trigger = deferred_trigger(task, workspace)
    workspace.fault(lost_request(), path=GET, skip=1)
    [event] = watch(trigger)
    task.resume(event)
    assert [request.status for request in workspace.requests_for(GET)].count(0) == 1
    assert task.pauses == []  # the hook's own retry never came to it
