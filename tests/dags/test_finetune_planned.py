# SPDX-License-Identifier: Apache-2.0
"""The shipped DAG with plan "auto" against the fake workspace: each run on a cluster that suits it."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed_provider.testing.workspace import FakeWorkspace

from dags.airflow_home import AirflowHome

CONF = {
    "model": "meta-llama/Llama-2-7b-hf",
    "sequence_length": 1024,
    "registered_model_name": None,
    "databricks_conn_id": "databricks_default",
    "base_uri": "/Volumes/main/default/fine-tunes",
    "plan": "auto",
    "job": {"run_fields": {"budget_policy_id": "b1"}},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_data_needs_no_gpus_and_the_evaluation_gets_what_the_fine_tune_had(tmp_path: Path) -> None:
    with FakeWorkspace(poll_s=3600) as workspace:
        airflow = AirflowHome(tmp_path, AIRFLOW_CONN_DATABRICKS_DEFAULT=workspace.connection_json)
        run = airflow.run_dag("finetune", CONF, timeout_seconds=400)
        submitted = {each.name.split()[1]: each for each in workspace.runs}
    assert run["state"] == "success", run["log"][-6000:]
    assert run["tasks"] == {
        **dict.fromkeys(("validate", "prepare", "finetune", "evaluate"), "success"),
        "register": "skipped",  # nobody named the model
    }
    clusters = {task: each.tasks[0]["new_cluster"] for task, each in submitted.items()}
    gpus = {entry["node_type_id"]: entry["num_gpus"] for entry in workspace.node_types}
    assert gpus[clusters["prepare"]["node_type_id"]] == 0
    assert gpus[clusters["finetune"]["node_type_id"]] > 0
    assert clusters["evaluate"]["node_type_id"] == clusters["finetune"]["node_type_id"]
    assert {each.body["budget_policy_id"] for each in submitted.values()} == {"b1"}
    assert "plans when it starts, for what the workspace of 'databricks_default' has then" in run["log"]
