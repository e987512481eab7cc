# SPDX-License-Identifier: Apache-2.0
"""Preparation of a data set as a durable run through the Jobs API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from bare_environment import make_bare_environment
from deepspeed_provider.operators.dataset import CLUSTER_KEY, PrepareDatasetOperator
from deepspeed_provider.testing import endings
from deepspeed_provider.testing.executing import ExecutingWorkspace
from deepspeed_provider.testing.workspace import FakeWorkspace
from training.written_data import ROWS

from operators.fake_task import TERMINAL, FakeTask

VOLUME = "/Volumes/main/default/runs"
SPEC = {"model": "m", "data": "/Volumes/main/default/input/rows.jsonl"}
CLUSTER = {"spark_version": "16.4.x-cpu-ml-scala2.12", "node_type_id": "m5.xlarge", "num_workers": 0}


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Any:
    with FakeWorkspace() as found:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", found.connection_json)
        yield found


def operator(**options: Any) -> PrepareDatasetOperator:
    asked = {"spec": SPEC, "base_uri": VOLUME, "poll_interval": 60.0, "retries": 1, **options}
    return PrepareDatasetOperator(task_id="prepare", databricks_conn_id="databricks_default", **asked)


def run(asked: PrepareDatasetOperator, workspace: FakeWorkspace, task: FakeTask | None = None) -> dict[str, Any]:
    """The next try of ``task``."""
    task = task or FakeTask()
    task.try_number += 1
    asked.clock, asked.sleep = lambda: workspace.clock.now_ms / 1000, workspace.advance
    return asked.execute(task.context())


def asked_for(workspace: FakeWorkspace) -> list[str]:
    return [one.path for one in workspace.requests if one.path.startswith("clusters/")]


def sent(workspace: FakeWorkspace) -> dict[str, Any]:
    """What the driver side of the newest run was sent."""
    (place,) = workspace.runs[-1].tasks[0]["spark_python_task"]["parameters"]
    return json.loads(workspace.files.contents[place])


def test_the_driver_prepares_and_its_manifest_comes_back(workspace: FakeWorkspace) -> None:
    manifest = run(operator(prompt_column="q", completion_column="a"), workspace)
    request = sent(workspace)
    assert request["on_driver"]
    assert not request["use_gpu"]
    settings = request["payload"]["settings"]
    assert (settings["source"], settings["prompt_column"]) == (SPEC["data"], "q")
    assert settings["output_uri"] == f"{VOLUME}/datasets"
    assert manifest["dataset_uri"].startswith(f"{VOLUME}/datasets/")
    assert manifest["billed_seconds"] > 0
    assert manifest["splits"]["heldout"]["rows"] == 10


def test_without_a_cluster_it_gets_the_smallest_machine_of_the_workspace(workspace: FakeWorkspace) -> None:
    run(operator(job={"cluster_fields": {"single_user_name": "trainers"}}), workspace)
    cluster = workspace.runs[-1].tasks[0]["new_cluster"]
    assert (cluster["node_type_id"], cluster["spark_version"]) == ("m5.xlarge", "17.3.x-cpu-ml-scala2.13")
    assert cluster["custom_tags"]["airflow_run_id"] == "manual__1"
    assert cluster["single_user_name"] == "trainers"


@pytest.mark.parametrize("form", [dict, json.dumps], ids=["mapping", "JSON text"])
def test_a_cluster_of_the_users_is_used_and_nobody_is_asked_for_another(workspace: FakeWorkspace, form: Any) -> None:
    workspace.clusters.add("mine")
    for job in ({"cluster": CLUSTER}, {"existing_cluster_id": "mine"}):
        run(operator(job=form(job)), workspace, FakeTask(run_id=str(job)))
        (name, value), task = *job.items(), workspace.runs[-1].tasks[0]
        assert task[{"cluster": "new_cluster"}.get(name, name)] == value
    assert "clusters/list-node-types" not in asked_for(workspace)


def test_deferred_it_is_one_run_on_one_cluster(workspace: FakeWorkspace) -> None:
    """Its cluster is chosen once, and what was free then stays."""
    task = FakeTask()
    with pytest.raises(TaskDeferred) as deferred:
        run(operator(deferrable=True), workspace, task)
    kept = task.store.get(CLUSTER_KEY)
    workspace.node_types.clear()
    workspace.advance(3600)
    asked = operator(deferrable=True)
    asked.clock = lambda: workspace.clock.now_ms / 1000
    kwargs = {**(deferred.value.kwargs or {}), "event": TERMINAL}
    manifest = asked.resume_execution(deferred.value.method_name, kwargs, task.context())
    assert manifest["dataset_uri"].startswith(VOLUME)
    assert [each.tasks[0]["new_cluster"] for each in workspace.runs] == [kept]
    assert asked_for(workspace).count("clusters/list-node-types") == 1


def test_data_that_cannot_be_used_fails_without_a_retry(workspace: FakeWorkspace) -> None:
    record = {"kind": "USER", "message": "source = 'x': holds no file with content.", "rank": None}
    workspace.next_run(endings.fails("DatasetError: …", failures={0: record}))
    with pytest.raises(AirflowFailException, match="holds no file with content"):
        run(operator(), workspace)


def test_a_retry_prepares_under_another_generation(workspace: FakeWorkspace) -> None:
    task = FakeTask()
    workspace.next_run(endings.internal_error())
    with pytest.raises(AirflowException):
        run(operator(), workspace, task)
    assert run(operator(), workspace, task)["rows"] == {"kept": 100}
    assert len({each.token for each in workspace.runs}) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param({"base_uri": None}, "needs a base_uri", id="no folder"),
        pytest.param({"spec": {"data": "docstrings"}}, "model = None: is required", id="no model"),
        pytest.param(
            {"job": {"clustre": CLUSTER}}, "is no setting of a job. Did you mean 'cluster'?", id="a setting of no job"
        ),
        pytest.param({"job": "[1]"}, "job = '[1]': is no JSON object", id="no object"),
    ],
)
def test_what_cannot_run_leaves_no_trace(workspace: FakeWorkspace, options: dict[str, Any], text: str) -> None:
    task = FakeTask()
    with pytest.raises(AirflowFailException) as caught:
        run(operator(**options), workspace, task)
    assert text in str(caught.value)
    assert task.record is None
    assert workspace.runs == []


def test_a_workspace_without_a_fitting_machine_is_told_with_what_would_work(workspace: FakeWorkspace) -> None:
    workspace.node_types[:] = [entry for entry in workspace.node_types if entry["num_gpus"]]
    with pytest.raises(AirflowFailException, match=r"no machine without GPUs .*job=\{'existing_cluster_id'"):
        run(operator(), workspace)
    assert workspace.runs == []


@pytest.mark.parametrize("nothing", ["None", "", "null"])
def test_empty_params_mean_spark_connect(
    fake_spark_connect: Any, monkeypatch: pytest.MonkeyPatch, nothing: str
) -> None:
    asked = PrepareDatasetOperator(
        task_id="prepare", spec=SPEC, databricks_conn_id=nothing, base_uri=nothing, job=nothing, deferrable=True
    )
    manifest = asked.execute(FakeTask(try_number=1).context())
    assert manifest["dataset_uri"].startswith("memory://runs/datasets/")
    assert len(fake_spark_connect.datasets) == 1


@pytest.fixture(scope="module")
def bare_workspace(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Whose programs have the libraries, but not this package: all code of it travels."""
    python = make_bare_environment(tmp_path_factory.mktemp("bare") / "venv")
    with ExecutingWorkspace(tmp_path_factory.mktemp("workspace"), python=str(python)) as found:
        yield found


@pytest.mark.slow
def test_it_really_prepares_once(bare_workspace: ExecutingWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", bare_workspace.connection_json)
    bare_workspace.contents[SPEC["data"]] = "\n".join(map(json.dumps, ROWS)).encode()

    def prepared(**options: Any) -> dict[str, Any]:
        asked = operator(poll_interval=0.2, job={"cluster": CLUSTER}, **options)
        return asked.execute(FakeTask(try_number=1, run_id=str(options)).context())

    manifest = prepared()
    (progress,) = [path for path in bare_workspace.contents if path.endswith("/progress.json")]
    assert json.loads(bare_workspace.contents[progress])["phase"] == "done"
    folder = Path(bare_workspace.contents.place(manifest["dataset_uri"]))
    written = {file: file.stat().st_mtime_ns for file in folder.rglob("*.parquet")}
    assert len(written) == 2
    assert manifest["rows"]["kept"] == len(ROWS)
    # Another task, with an equal request on equal data.
    again = prepared(retries=2)
    assert len(bare_workspace.runs) == 2
    assert {**again, "billed_seconds": 0} == {**manifest, "billed_seconds": 0}
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*.parquet")} == written


@pytest.mark.slow
def test_what_is_wrong_with_the_data_is_told_as_it_is(
    bare_workspace: ExecutingWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", bare_workspace.connection_json)
    asked = operator(spec={**SPEC, "data": "/Volumes/main/default/input/none.jsonl"}, job={"cluster": CLUSTER})
    asked.poll_interval = 0.2
    with pytest.raises(AirflowFailException) as caught:
        asked.execute(FakeTask(try_number=1).context())
    text = "source = '/Volumes/main/default/input/none.jsonl': the cluster finds no such file or folder."
    assert f"USER: DatasetError: {text} (from the driver)" in str(caught.value)
