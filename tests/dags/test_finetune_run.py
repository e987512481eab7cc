# SPDX-License-Identifier: Apache-2.0
"""The shipped DAG under ``dag.test()``: a real engine, real ranks, a real registry, a tiny model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepspeed_provider.local.engine import EmbeddedEngine
from training.tiny_runs import make_model

from dags.airflow_home import TELL, AirflowHome

RUN = """
import json, sys
from airflow.dag_processing.dagbag import DagBag

dag = DagBag(sys.argv[1]).dags[sys.argv[2]]
run = dag.test(run_conf=json.loads(sys.argv[3]))
"""
EVENTS = """
from airflow.models.asset import AssetEvent
with create_session() as session:
    events = [event.extra for event in session.query(AssetEvent)]
print("FOUND" + json.dumps({"state": str(run.state), "tasks": tasks, "xcoms": xcoms, "events": events}, default=str))
"""


@pytest.fixture(scope="module")
def airflow_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a shipped DAG with a conf in an Airflow of its own, and returns what became of it."""
    home = tmp_path_factory.mktemp("dag-test")
    airflow = AirflowHome(
        home,
        DEEPSPEED_PROVIDER_HOME=str(home / "state"),
        MLFLOW_TRACKING_URI=f"sqlite:///{home}/mlflow.db",
        OMP_NUM_THREADS="1",
    )

    def run(dag_id: str, conf: dict[str, Any]) -> dict[str, Any]:
        return airflow.run(RUN + TELL + EVENTS, dag_id, json.dumps(conf), timeout_seconds=1200)

    try:
        yield run
    finally:
        EmbeddedEngine(home / "state").stop()


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("input")
    rows = [{"prompt": f"What is {n} plus one?", "completion": f"It is {n + 1}."} for n in range(200)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "model": str(make_model(folder / "model")),
        "data": (folder / "sums.jsonl").as_uri(),
        "max_steps": "12",
        "learning_rate": "1e-2",
        "sequence_length": 64,
        "evaluation_rows": 8,
        "generations": 1,
        "registered_model_name": "sums",
    }


@pytest.fixture(scope="module")
def finished(airflow_run: Any, conf: dict[str, Any]) -> dict[str, Any]:
    """One fine-tune through the shipped DAG."""
    return airflow_run("finetune", conf)


@pytest.mark.slow
@pytest.mark.timeout(1500)
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
    assert "step 12/12, loss" in run["log"]  # told by the trigger while the task was deferred


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_finished_model_is_evaluated_again(airflow_run: Any, conf: dict[str, Any], finished: dict[str, Any]) -> None:
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_request_with_problems_fails_in_the_first_task(airflow_run: Any, conf: dict[str, Any]) -> None:
    run = airflow_run("finetune", {**conf, "epochs": "2", "data": "docstring", "effective_batch_size": 3})
    assert run["state"] == "failed"
    assert run["tasks"]["validate"] == "failed"
    assert run["tasks"]["finetune"] == "upstream_failed"
    for text in ("3 problems", "only one of max_steps and epochs", "Did you mean 'docstrings'", "Nearest that can"):
        assert text in run["log"]
