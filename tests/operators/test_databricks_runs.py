# SPDX-License-Identifier: Apache-2.0
"""Exactly once through the Jobs API, in blocking and in deferrable mode, against a fake workspace."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import RetryAction
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from deepspeed_provider.operators.durable import DurableRunOperator
from deepspeed_provider.retry_policy import FineTuneRetryPolicy
from deepspeed_provider.testing import endings, faults
from deepspeed_provider.testing.workspace import FakeWorkspace

from operators.fake_task import Crash, crash_at
from operators.workspace_task import WorkspaceTask

SUBMIT, GET = "jobs/runs/submit", "jobs/runs/get"
OUTPUT = "jobs/runs/get-output"
NO_PERMISSION = faults.Fault(status=403, body={"error_code": "PERMISSION_DENIED", "message": "No CAN_VIEW on the run."})
SUBMITTED = (f"2.2/{SUBMIT}", "after")


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Any:
    with FakeWorkspace() as found:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", found.connection_json)
        yield found


@pytest.fixture
def task(workspace: FakeWorkspace) -> WorkspaceTask:
    return WorkspaceTask(workspace=workspace)


def deferred_task(task: WorkspaceTask) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(deferrable=True)
    return deferred.value


def test_one_run_its_result_and_a_link_to_it(task: WorkspaceTask, deferrable: bool) -> None:
    output = task.run(deferrable=deferrable)
    (run,) = task.workspace.runs
    assert output["generation"] == 1
    assert output["token"] == run.token
    assert task.xcoms["databricks_run_url"] == run.url
    assert task.xcoms["cluster_logs_url"] == logs_of(run)
    assert task.record["phase"] == "closed"


def logs_of(run: Any) -> str:
    """The page of the driver's logs on the cluster that the fake workspace made for it."""
    host = run.url.partition("/?")[0]
    return f"{host}/compute/sparkui/{run.cluster_id('deepspeed', 0)}/driver-logs?o=1"


def test_while_a_task_is_deferred_its_trigger_tells_the_cluster_logs(task: WorkspaceTask) -> None:
    task.options["poll_interval"] = 5.0
    deferred, told = deferred_task(task), []
    (run,) = task.workspace.runs
    progress = json.dumps({"phase": "training", "step": 1, "total_steps": 3}).encode()
    task.workspace.files.write(f"{deferred.trigger.handle['output_uri']}/progress.json", progress)

    async def set_xcom(**what: Any) -> None:
        told.append(what)

    asyncio.run(task.watched(deferred, set_xcom=set_xcom))
    assert told == [{**deferred.trigger.task_key, "key": "_link_ClusterLogsLink", "value": logs_of(run)}]


def test_a_failed_run_links_to_its_cluster_logs(task: WorkspaceTask, deferrable: bool) -> None:
    task.workspace.next_run(endings.host_killed())
    with pytest.raises(AirflowException):
        task.run(deferrable=deferrable)
    assert task.xcoms["cluster_logs_url"] == logs_of(task.workspace.runs[0])


DELAYS = {
    "no machines": (endings.stock_out(), RetryAction.RETRY, timedelta(minutes=10)),
    "the platform": (endings.internal_error(), RetryAction.RETRY, timedelta(minutes=1)),
    "nobody knows": (endings.fails("ValueError: no rows"), RetryAction.RETRY, None),
    "host memory": (endings.host_killed(), RetryAction.FAIL, None),
}


@pytest.mark.parametrize(("ending", "action", "delay"), DELAYS.values(), ids=DELAYS)
def test_the_shipped_policy_reads_what_a_task_raises(
    task: WorkspaceTask, deferrable: bool, ending: endings.Ending, action: RetryAction, delay: timedelta | None
) -> None:
    task.workspace.next_run(ending)
    with pytest.raises(AirflowException) as caught:
        task.run(deferrable=deferrable)
    decision = FineTuneRetryPolicy().evaluate(caught.value, try_number=1, max_tries=2)
    assert (decision.action, decision.retry_delay) == (action, delay)
    assert str(decision.reason) in str(caught.value)


def test_code_is_uploaded_once_for_all_runs_and_tasks(task: WorkspaceTask, workspace: FakeWorkspace) -> None:
    task.run(deferrable=False)
    task.clear()
    task.run(deferrable=False)
    uploads = [request.path for request in workspace.requests if request.method == "PUT"]
    assert sum(path.endswith(".zip") for path in uploads) == 1
    assert sum(path.endswith("launch.py") for path in uploads) == 1
    assert sum(path.endswith("request.json") for path in uploads) == 2


@pytest.mark.parametrize("moment", range(1, 46))
def test_a_worker_killed_at_any_request_leaves_one_run(task: WorkspaceTask, moment: int, deferrable: bool) -> None:
    task.on_call = task.store.on_call = crash_at(moment)
    outputs = []
    for _ in range(3):
        try:
            outputs.append(task.run(deferrable=deferrable))
            break
        except Crash:
            continue
    assert len(outputs) == 1
    assert outputs[0]["generation"] == 1
    assert len(task.workspace.runs) == 1
    assert task.workspace.runs[0].cancels == 0


LOST = {
    "answer": faults.lost_response(),
    "request": faults.lost_request(),
    "503 after": faults.server_error(after=True),
}


@pytest.mark.parametrize("fault", LOST.values(), ids=LOST)
def test_a_submission_whose_answer_is_lost_is_one_run(
    task: WorkspaceTask, deferrable: bool, fault: faults.Fault
) -> None:
    task.workspace.fault(fault, path=SUBMIT, times=6)  # longer than one call is patient
    task.run(deferrable=deferrable)
    assert len(task.workspace.runs) == 1


def test_a_token_that_is_refused_after_a_lost_answer_is_not_the_end_of_the_run(
    task: WorkspaceTask, deferrable: bool
) -> None:
    """The run had arrived, and has ended meanwhile, so that it is not among the active ones."""
    task.workspace.next_run(start_s=0, run_s=1, stop_s=0)
    task.workspace.fault(faults.lost_response(), path=SUBMIT, times=4)  # no call is more patient
    task.workspace.fault(faults.refused_token(403), path=SUBMIT, times=2)
    with pytest.raises(AirflowException, match="TRANSIENT: Databricks refuses the run") as caught:
        task.run(deferrable=deferrable)
    assert not isinstance(caught.value, AirflowFailException), "a retry comes"
    assert task.run(deferrable=deferrable)["generation"] == 1
    assert len(task.workspace.runs) == 1


STORMS = {
    "429 with a time": (faults.too_many_requests(30), 8),
    "429 with more than a call's patience": (faults.too_many_requests(300), 3),
    "503": (faults.server_error(503), 12),
    "dropped connections": (faults.lost_request(), 12),
    "token refused, and accepted again": (faults.refused_token(401), 5),
    "permission refused, and given again": (faults.refused_token(403), 5),
    "a proxy's page": (faults.stray_page(404), 12),
    "a run that is there is not known": (faults.unknown_run(), 1),
    "nor again": (faults.unknown_run(), 4),
}


@pytest.mark.parametrize(("fault", "times"), STORMS.values(), ids=STORMS)
def test_nothing_that_passes_ends_the_wait(
    task: WorkspaceTask, deferrable: bool, fault: faults.Fault, times: int
) -> None:
    task.workspace.fault(fault, path=GET, times=times, skip=2)
    assert task.run(deferrable=deferrable)["generation"] == 1
    assert len(task.workspace.runs) == 1
    assert task.workspace.runs[0].cancels == 0


def test_a_run_that_is_never_shown_is_waited_for_until_the_deadline(task: WorkspaceTask, deferrable: bool) -> None:
    """Its token says that it is there, and everything else that it is not."""
    task.options["timeout"] = timedelta(hours=1)
    task.workspace.next_run(run_s=1e6)
    task.workspace.fault(faults.unknown_run(), path=GET, times=10**6)
    with pytest.raises(AirflowException, match="deadline"):
        task.run(deferrable=deferrable)
    assert len(task.workspace.runs) == 1
    assert len(task.workspace.requests_for(SUBMIT)) < 200


def test_a_state_that_is_not_known_yet_is_waited_through(task: WorkspaceTask, deferrable: bool) -> None:
    task.workspace.next_run(running_as="SOMETHING_NEW")
    task.run(deferrable=deferrable)
    assert len(task.workspace.runs) == 1


def test_a_full_workspace_is_waited_for(task: WorkspaceTask, deferrable: bool) -> None:
    task.workspace.next_run(queue_s=3600.0)
    task.run(deferrable=deferrable)
    assert len(task.workspace.runs) == 1


FAILURES = {
    "user code": (endings.fails("ValueError: no rows"), "no rows", True),
    "one rank's GPU among echoes": (endings.out_of_gpu_memory(rank=3, ranks=4), "GPU_OOM on rank 3", False),
    "the same without files": (
        endings.out_of_gpu_memory(rank=3, ranks=4, failure_files=False),
        "GPU_OOM: the training failed",
        False,
    ),
    "host memory": (endings.host_killed(), "HOST_OOM", False),
    "library": (endings.library_failure(), "peft", False),
    "no machines": (endings.stock_out(), "CAPACITY", True),
    "spot machine taken": (endings.spot_loss(), "CAPACITY", True),
    "the platform": (endings.internal_error(), "TRANSIENT", True),
}


@pytest.mark.parametrize(("ending", "said", "retried"), FAILURES.values(), ids=FAILURES)
def test_a_failure_has_its_cause_and_its_kind(
    task: WorkspaceTask, deferrable: bool, ending: endings.Ending, said: str, retried: bool
) -> None:
    task.workspace.next_run(ending)
    with pytest.raises(AirflowException) as caught:
        task.run(deferrable=deferrable)
    assert said in str(caught.value)
    assert str(caught.value).count(task.workspace.runs[0].url) == 1
    assert isinstance(caught.value, AirflowFailException) is not retried
    if not retried:
        task.clear()  # only a person makes it run again
    task.run(deferrable=deferrable)
    assert len(task.workspace.runs) == 2, "what comes after a judgement is a run of its own"


def test_a_failure_without_ranks_names_the_run_page(task: WorkspaceTask) -> None:
    task.workspace.next_run(endings.stock_out())
    with pytest.raises(AirflowException, match="AWS_INSUFFICIENT_INSTANCE_CAPACITY_FAILURE") as caught:
        task.run(deferrable=False)
    assert task.workspace.runs[0].url in str(caught.value)


def test_cancelled_on_databricks_by_somebody_is_the_end(task: WorkspaceTask, deferrable: bool) -> None:
    task.workspace.next_run(run_s=1e6)
    deferred = deferred_task(task)
    task.workspace.jobs.cancel(task.workspace.runs[0].run_id)
    with pytest.raises(AirflowFailException, match="somebody cancelled the run"):
        task.after(deferred)
    assert len(task.workspace.runs) == 1
    assert task.record["outcome"] == "cancelled"


def test_whoever_ends_its_cluster_ends_the_run(task: WorkspaceTask, deferrable: bool) -> None:
    task.workspace.next_run(endings.cluster_ended_by_somebody())
    with pytest.raises(AirflowFailException, match=r"somebody cancelled the run .*CLUSTER_TERMINATED_BY_USER"):
        task.run(deferrable=deferrable)
    assert len(task.workspace.runs) == 1


@pytest.mark.parametrize("refusal", [faults.refused_token(401), faults.refused_token(403), NO_PERMISSION])
def test_a_result_that_is_refused_for_a_while_is_waited_for(
    task: WorkspaceTask, deferrable: bool, refusal: faults.Fault
) -> None:
    """Storage that only the cluster reads: the run's output alone has its result."""
    task.base_uri = "s3://bucket/runs"
    task.workspace.fault(refusal, path=OUTPUT, times=5)
    assert task.run(deferrable=deferrable)["generation"] == 1
    assert len(task.workspace.runs) == 1


def test_a_worker_killed_within_a_submission_leaves_a_run_that_is_known_again(task: WorkspaceTask) -> None:
    """By its id: its page is told while it lives, and it need not be looked for among the runs of others."""
    task.workspace.next_run(start_s=60.0, run_s=3600.0)
    task.on_call = lambda path, moment: crash_at(1)(path, moment) if (path, moment) == SUBMITTED else None
    with pytest.raises(Crash):
        task.execute(deferrable=True)
    task.on_call = lambda *_: None
    (run,) = task.workspace.runs
    deferred = deferred_task(task)
    assert deferred.trigger.handle["ids"] == {"run_id": str(run.run_id)}
    assert task.xcoms["databricks_run_url"] == run.url
    lists = len(task.workspace.requests_for("jobs/runs/list"))
    asyncio.run(task.watched(deferred))
    assert len(task.workspace.requests_for("jobs/runs/list")) - lists <= len(task.workspace.requests_for(GET)) + 10


def test_what_is_refused_before_it_is_sent_leaves_nothing_to_stop(
    task: WorkspaceTask, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    task.job_settings = {"existing_cluster_id": "no-such-cluster"}
    with pytest.raises(AirflowFailException, match="no-such-cluster"):
        task.execute(deferrable=False)
    assert task.record["outcome"] == "failed"
    assert task.workspace.requests_for("jobs/runs/list") == []
    assert "cancelling" not in caplog.text + capsys.readouterr().out


def test_a_retry_just_after_a_cancel_of_ours_waits_for_the_end_and_runs_anew(
    task: WorkspaceTask, deferrable: bool
) -> None:
    """The stock operator attaches to the dying run, and fails with it."""
    task.workspace.next_run(run_s=1e6, stop_s=300.0)
    deferred_task(task)
    task.workspace.jobs.cancel(task.workspace.runs[0].run_id)
    output = task.run(deferrable=deferrable)
    assert output["generation"] == 2
    assert len(task.workspace.runs) == 2


def test_clearing_a_live_run_attaches_and_a_success_runs_anew(task: WorkspaceTask, deferrable: bool) -> None:
    deferred_task(task)
    task.clear()
    assert task.run(deferrable=deferrable)["generation"] == 1
    task.clear()
    assert task.run(deferrable=deferrable)["generation"] == 2
    assert [run.cancels for run in task.workspace.runs] == [0, 0]


def test_a_run_that_somebody_deleted_is_replaced(task: WorkspaceTask) -> None:
    task.workspace.next_run(run_s=1e6)
    deferred = deferred_task(task)
    task.workspace.jobs.forget(task.workspace.runs[0].run_id)
    assert task.after(deferred)["generation"] == 2


def test_a_token_whose_run_was_deleted_gives_way_to_the_next_generation(task: WorkspaceTask, deferrable: bool) -> None:
    """The worker died before it could note the run, and the run was deleted before the next try."""
    task.on_call = lambda path, moment: crash_at(1)(path, moment) if (path, moment) == SUBMITTED else None
    with pytest.raises(Crash):
        task.run(deferrable=deferrable)
    (run,) = task.workspace.runs
    task.workspace.jobs.forget(run.run_id)
    task.on_call = lambda *_: None
    assert task.run(deferrable=deferrable)["generation"] == 2


def test_a_result_outlives_its_run(task: WorkspaceTask, workspace: FakeWorkspace) -> None:
    deferred = deferred_task(task)
    workspace.advance(10_000)
    workspace.jobs.get(workspace.runs[0].run_id, {})
    workspace.jobs.forget(workspace.runs[0].run_id)
    assert task.after(deferred)["generation"] == 1
    assert workspace.runs == []


def test_a_deadline_cancels_and_watches_the_run_stop(task: WorkspaceTask, deferrable: bool) -> None:
    task.workspace.next_run(run_s=1e6, stop_s=60.0)
    task.options["timeout"] = timedelta(hours=2)
    with pytest.raises(AirflowFailException, match="deadline"):
        task.run(deferrable=deferrable)
    (run,) = task.workspace.runs
    assert run.cancels == 1
    assert run.course(task.workspace.clock.now_ms).phase == "ENDED"
    assert run.body["timeout_seconds"] == 2 * 3600 + 900, "should nobody be left to cancel it"


def test_storage_that_only_the_cluster_reads_tells_by_marked_lines(workspace: FakeWorkspace, deferrable: bool) -> None:
    task = WorkspaceTask(workspace=workspace, base_uri="s3://bucket/runs")
    assert task.run(deferrable=deferrable)["generation"] == 1
    workspace.next_run(endings.out_of_gpu_memory(rank=1, ranks=2))
    task.clear()
    with pytest.raises(AirflowFailException, match="GPU_OOM on rank 1 at step 1"):
        task.run(deferrable=deferrable)
    assert not [path for path in workspace.files.contents if "returned" in path]


def test_a_refused_submission_fails_at_once_with_its_reason(task: WorkspaceTask, workspace: FakeWorkspace) -> None:
    workspace.node_types.clear()
    with pytest.raises(AirflowFailException, match=r"g5\.xlarge"):
        task.run(deferrable=False)
    assert workspace.runs == []
    assert task.record["outcome"] == "failed"


@pytest.mark.parametrize(
    "job",
    [
        pytest.param({"clusterr": {}}, id="a setting that is none"),
        pytest.param('{"cluster": ', id="no JSON"),
    ],
)
def test_settings_that_have_become_wrong_do_not_keep_a_run_from_being_stopped(
    task: WorkspaceTask, deferrable: bool, job: Any
) -> None:
    """Somebody has edited the DAG meanwhile: the task fails without a retry, so nobody would watch the run."""
    task.workspace.next_run(run_s=1e6, stop_s=60.0)
    deferred_task(task)
    operator = task.new_operator(deferrable=deferrable, job=job)
    operator.get_backend = lambda: DurableRunOperator.get_backend(operator)
    with pytest.raises(AirflowFailException, match="job"):
        operator.execute(task.context())
    (run,) = task.workspace.runs
    assert run.cancels == 1
    assert run.course(task.workspace.clock.now_ms).phase == "ENDED"


@pytest.mark.parametrize("state", ["failed", "success", "deferred", "running", None])
def test_a_killed_trigger_cancels_for_a_task_that_has_ended_only(task: WorkspaceTask, state: str | None) -> None:
    task.workspace.next_run(run_s=1e6)
    deferred = deferred_task(task)

    async def states(**_: Any) -> Any:
        return {"manual__1": {"train": state}}

    asyncio.run(task.trigger(deferred, get_task_states=states).on_kill())
    (run,) = task.workspace.runs
    assert run.cancels == (1 if state in ("failed", "success") else 0)
    assert (run.course(task.workspace.clock.now_ms).phase == "ENDED") is bool(run.cancels)
