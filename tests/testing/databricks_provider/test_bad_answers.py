# SPDX-License-Identifier: Apache-2.0
"""Bad answers while the Databricks provider (7.23) polls, in the worker and in the triggerer.

Codes such as C2 or G4, in names and ids, are the rows of the table in which these behaviours were first written down,
as seen against another stub.
"""

from __future__ import annotations

import pytest
from airflow.exceptions import AirflowException
from airflow.providers.databricks.exceptions import DatabricksApiError
from deepspeed_provider.testing.faults import Fault, refused_token, server_error, too_many_requests
from deepspeed_provider.testing.workspace import FakeWorkspace

from testing.databricks_provider.task import GET, DatabricksTask, assert_left_running, running, submits


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(too_many_requests(retry_after_s=30), id="C-429_retry_after_30"),
        pytest.param(server_error(503, retry_after_s=30), id="C-503_retry_after_30"),
    ],
)
def test_one_is_asked_again_about_after_a_second(fault: Fault, task: DatabricksTask, workspace: FakeWorkspace) -> None:
    workspace.fault(fault, path=GET, skip=task.looks_before_second_poll)
    task.run_to_end()
    assert task.pauses == [1.0]  # Retry-After is not read
    assert submits(workspace) == 1


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(too_many_requests(retry_after_s=30), id="C2_G4-429"),
        pytest.param(server_error(503), id="C3_G4-503"),
    ],
)
def test_three_fail_the_task_in_three_seconds(fault: Fault, task: DatabricksTask, workspace: FakeWorkspace) -> None:
    running(workspace)
    workspace.fault(fault, path=GET, times=3, skip=task.looks_before_second_poll)
    with pytest.raises(AirflowException, match="failed 3 times"):
        task.run_to_end()
    assert task.pauses == [1.0, 2.0]
    assert_left_running(workspace)


@pytest.mark.parametrize("status", [401, 403], ids=["D_G3-401", "D1_G3-403"])
def test_one_refusal_fails_the_task_at_once(status: int, task: DatabricksTask, workspace: FakeWorkspace) -> None:
    running(workspace)
    workspace.fault(refused_token(status), path=GET, skip=task.looks_before_second_poll)
    with pytest.raises(DatabricksApiError) as caught:
        task.run_to_end()
    assert caught.value.http_status_code == status
    assert task.pauses == []
    assert_left_running(workspace)
