# SPDX-License-Identifier: Apache-2.0
"""The shipped DAGs parse, are short, and can be taken up again by a retry."""

from __future__ import annotations

from pathlib import Path

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization
from deepspeed_provider.operators.durable import DurableRunOperator
from deepspeed_provider.operators.finetune import DeepSpeedFineTuneOperator

FOLDER = Path(__file__).parents[2] / "dags"


@pytest.fixture(scope="module")
def dagbag() -> DagBag:
    return DagBag(str(FOLDER))


def test_every_file_gives_its_dag(dagbag: DagBag) -> None:
    assert dagbag.import_errors == {}
    assert set(dagbag.dags) == {path.stem for path in FOLDER.glob("*.py")}


def test_finetune_goes_from_the_check_to_the_registry(dagbag: DagBag) -> None:
    dag = dagbag.dags["finetune"]
    assert [task.task_id for task in dag.topological_sort()] == [
        "validate",
        "prepare",
        "finetune",
        "evaluate",
        "register",
    ]
    assert [asset.name for asset in dag.get_task("register").outlets] == ["fine-tuned-model"]


def test_runs_on_the_cluster_are_deferred_bounded_and_retried(dagbag: DagBag) -> None:
    tasks = [task for dag in dagbag.dags.values() for task in dag.tasks if isinstance(task, DurableRunOperator)]
    assert tasks
    for task in tasks:
        assert task.deferrable
        assert task.timeout is not None
        assert task.retries >= 1
        assert task.execution_timeout is None


LINKS = {"MLflow run", "Spark UI", "Databricks run", "Cluster logs"}


def test_links_survive_the_serialisation(dagbag: DagBag) -> None:
    dag = DagSerialization.deserialize_dag(DagSerialization.serialize_dag(dagbag.dags["finetune"]))
    assert set(dag.get_task("finetune").operator_extra_link_dict) == LINKS
    assert set(dag.get_task("evaluate").operator_extra_link_dict) == LINKS


def test_a_mapped_fine_tune_is_serialised_with_its_links() -> None:
    with DAG("mapped") as dag:
        partial = DeepSpeedFineTuneOperator.partial(
            task_id="finetune", dataset="/Volumes/a/b/c", databricks_conn_id="d"
        )
        partial.expand(spec=[{"max_steps": 1}, {"max_steps": 2}])
    found = DagSerialization.deserialize_dag(DagSerialization.serialize_dag(dag))
    assert set(found.get_task("finetune").operator_extra_link_dict) == LINKS


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_a_dag_file_fits_one_look(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
