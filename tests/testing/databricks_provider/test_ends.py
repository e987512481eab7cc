# SPDX-License-Identifier: Apache-2.0
"""How runs end for the Databricks provider's operator (7.23), in blocking and in deferrable mode."""

from __future__ import annotations

import pytest
from airflow.exceptions import AirflowException
from deepspeed_provider.testing.endings import Ending, fails, internal_error, succeeds, succeeds_with_failures
from deepspeed_provider.testing.timeline import Phase
from deepspeed_provider.testing.workspace import FakeWorkspace

from testing.databricks_provider.task import (
    OUTPUT,
    SUBMIT,
    DatabricksTask,
    assert_left_running,
    cancels,
    phase,
    submits,
)


def test_a_run_from_submit_to_success(task: DatabricksTask, workspace: FakeWorkspace) -> None:
    task.run_to_end()
    [run] = workspace.runs
    job = {"job_id": run.job_id} if task.options["deferrable"] else {}
    assert task.xcoms == {"run_id": run.run_id, "run_page_url": run.url, **job}
    assert phase(workspace) is Phase.ENDED
    [request] = workspace.requests_for(SUBMIT)
    assert request.arguments["tasks"][0]["new_cluster"]["num_workers"] == "2"  # the operator quotes numbers


@pytest.mark.parametrize(
    ("ending", "timeout_s", "told", "outputs"),
    [
        pytest.param(internal_error(), None, "INTERNAL_ERROR", 1, id="E-internal_error"),
        pytest.param(fails("ValueError: no such column"), None, "no such column", 1, id="E-user_code"),
        pytest.param(succeeds(), 360, "TIMEDOUT", 0, id="E2-timed_out"),
        pytest.param(succeeds_with_failures(), None, "SUCCESS_WITH_FAILURES", 0, id="E3-success_with_failures"),
    ],
)
def test_an_end_that_is_no_success_has_no_kind(
    ending: Ending, timeout_s: int | None, told: str, outputs: int, task: DatabricksTask, workspace: FakeWorkspace
) -> None:
    workspace.next_run(ending)
    task.options["timeout_seconds"] = timeout_s
    with pytest.raises(AirflowException, match=told) as caught:
        task.run_to_end()
    assert type(caught.value) is AirflowException  # whatever the cause: Airflow will retry it
    assert len(workspace.requests_for(OUTPUT)) == outputs  # the cause is looked for where the result is FAILED
    assert (submits(workspace), cancels(workspace)) == (1, 0)


def test_e4_an_unknown_state_fails_the_task_and_orphans_the_run(task: DatabricksTask, workspace: FakeWorkspace) -> None:
    workspace.next_run(start_s=300, running_as="MIGRATING")  # after what the operator asks before it defers
    with pytest.raises(AirflowException, match="Unexpected life cycle state: MIGRATING"):
        task.run_to_end()
    assert_left_running(workspace)
