# SPDX-License-Identifier: Apache-2.0
"""The first task's check: of the spec, and of where it is to run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from deepspeed_provider.operators.validate import ValidateSpecOperator
from deepspeed_provider.params import place_params
from deepspeed_provider.testing.workspace import FakeWorkspace

from operators.test_finetune_handover import gpu_plan, plan_of_hardware_that_is_there

SPEC = {"model": "llama-2-7b-hf", "method": "lora", "max_steps": 3, "sequence_length": 1024}
PLAN = gpu_plan(method="lora", node_type=["g5.12xlarge"], max_nodes=1)
BASE = "/Volumes/main/default/runs"
HARDWARE = {"gpu": "A10G", "gpus_per_node": 1}
THERE = plan_of_hardware_that_is_there(method="lora", **HARDWARE)
OWN = {"cluster": {"spark_version": "16.4.x-gpu-ml-scala2.12", "node_type_id": "g5.xlarge", "num_workers": 0}}


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Any:
    with FakeWorkspace() as found:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", found.connection_json)
        yield found


def validate(params: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    asked = {"databricks_conn_id": "databricks_default", "base_uri": BASE, **options}
    return ValidateSpecOperator(task_id="validate", **asked).execute({"params": {**SPEC, **(params or {})}})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        pytest.param(
            {"plan": "auto"}, "plans when it starts, for what the workspace of 'databricks_default'", id="auto"
        ),
        pytest.param(
            {"plan": "auto", "plan_options": '{"budget_usd": "50", "node_type": "g5.", "rows": 10, "spot": true}'},
            "plans when it starts, for what the workspace",
            id="auto within limits",
        ),
        pytest.param(
            {"plan": "auto", "plan_options": {"hardware": HARDWARE}, "job": OWN},
            "On 1 x 1 A10G: bf16, ZeRO ",
            id="auto on a cluster of one's own",
        ),
        pytest.param(
            {"plan": "auto", "plan_options": {"hardware": HARDWARE, "download": True}, "job": OWN},
            "plans when it starts, for 1 x 1 A10G",
            id="auto for a model that is not here",
        ),
        pytest.param({"plan": THERE, "job": OWN}, "1 machine with 1 GPU", id="a plan of machines that are there"),
        pytest.param({"plan": "Auto "}, "plans when it starts", id="auto, however it is written"),
        pytest.param({"plan": PLAN}, "1 machine with 4 GPUs", id="a plan"),
        pytest.param({"plan": json.dumps(PLAN), "job": "null"}, "1 machine with 4 GPUs", id="a plan as JSON"),
        pytest.param({"job": OWN, "use_gpu": "True"}, "Runs on 1 machine with 1 GPU.", id="a cluster of one's own"),
        pytest.param({"job": json.dumps(OWN), "plan": "None"}, "Runs on 1 machine with 1 CPU process.", id="texts"),
        pytest.param({"job": {**OWN, "code_folder": BASE}, "base_uri": "s3://b/runs"}, "1 CPU", id="object storage"),
    ],
)
def test_what_will_run_is_told_without_asking_the_workspace(
    workspace: FakeWorkspace, capsys: pytest.CaptureFixture[str], options: dict[str, Any], told: str
) -> None:
    place = {name: param.value for name, param in place_params().items()}
    assert validate(place, **options)["model"] == SPEC["model"]
    assert told in capsys.readouterr().out
    assert workspace.requests == []


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        pytest.param(
            {"databricks_conn_id": "mine", "plan": "auto"}, ["databricks_conn_id = 'mine': is not"], id="conn"
        ),
        pytest.param({"base_uri": "None", "plan": "auto"}, ["base_uri = None: is needed"], id="no folder"),
        pytest.param({"base_uri": "/Volumes/main", "plan": "auto"}, ["is no folder of a Volume"], id="no volume"),
        pytest.param({"base_uri": f"{BASE}/../../x", "plan": "auto"}, ["is no folder of a Volume"], id="out of it"),
        pytest.param({"databricks_conn_id": "other", "plan": "auto"}, ["of the type 'http'"], id="another type"),
        pytest.param({"plan": "cheap"}, ["plan = 'cheap': is not JSON", "or 'auto'"], id="a word for a plan"),
        pytest.param(
            {"job": {**OWN, "task_fields": {"max_retries": 3}}}, ["job.task_fields.max_retries = 3: is set"], id="ours"
        ),
        pytest.param(
            {"databricks_conn_id": "", "job": OWN, "base_uri": BASE, "plan": "auto"},
            ["3 problems", "plan = 'auto'", "job = {'cluster'", f"base_uri = {BASE!r}: is in a workspace"],
            id="a forgotten connection",
        ),
        pytest.param({"base_uri": "s3://b/runs", "plan": "auto"}, ["job has no code_folder"], id="unread storage"),
        pytest.param({}, ["job = None: names no cluster, and there is no plan"], id="no cluster"),
        pytest.param(
            {"plan": "auto", "plan_options": json.dumps({"hardware": HARDWARE})},
            ["plan_options.hardware = {'gpu': 'A10G', 'gpus_per_node': 1}: is of a cluster that is there"],
            id="hardware of no cluster",
        ),
        pytest.param(
            {"plan": "auto", "plan_options": {"hardware": {"gpu": "A1", "gpus": 1}, "budgt": 3}, "job": OWN},
            ["4 problems", "hardware.gpu = 'A1'", "hardware.gpus = 1", "hardware.gpus_per_node", "budgt = 3"],
            id="wrong hardware",
        ),
        pytest.param(
            {"plan": "auto", "plan_options": {"hardware": {"gpu": "T4", "gpus_per_node": 1, "ram_gib": 4}}, "job": OWN},
            ["hardware = '1 x 1 T4': is too little for llama-2-7b-hf: "],
            id="too little",
        ),
        pytest.param(
            {"plan": "auto", "plan_options": {"budgt_usd": 5, "node_type": "g5.,p4x", "deadline_hours": "soon"}},
            [
                "3 problems",
                "plan_options.budgt_usd = 5: there is no such option. Did you mean 'budget_usd'?",
                "plan_options.node_type = 'p4x'",
                "plan_options.deadline_hours = 'soon': should be a number above 0",
            ],
            id="wrong limits",
        ),
        pytest.param({"plan_options": {"top": 3}, "job": OWN}, ["plan_options = {'top': 3}: are for"], id="no plan"),
        pytest.param({"job": OWN, "plan": "auto"}, ["plan = 'auto': chooses a cluster, and job names one"], id="two"),
        pytest.param(
            {"job": {"clustre": 1, **OWN}}, ["job.clustre = 1: is no setting of a job"], id="a setting of no job"
        ),
        pytest.param({"job": "[1]"}, ["job = '[1]': is no JSON object"], id="no object"),
        pytest.param({"job": OWN, "use_gpu": "maybe"}, ["use_gpu = 'maybe': should be true or false"], id="no switch"),
        pytest.param({"plan": "{}"}, ["is no plan of a cluster"], id="no plan"),
        pytest.param({"plan": {**PLAN, "sequence_length": 8}}, ["sequence_length = 1024"], id="another training"),
        pytest.param(
            {"base_uri": "", "job": {"queue": True}},
            ["2 problems", "base_uri = None", "job = {'queue': True}: names no cluster"],
            id="all at once",
        ),
    ],
)
def test_problems_of_the_place_are_told(
    workspace: FakeWorkspace, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], texts: list[str]
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", '{"conn_type": "http", "host": "h", "password": "x"}')
    with pytest.raises(AirflowFailException) as caught:
        validate(**options)
    assert [text for text in texts if text not in str(caught.value)] == []
    assert workspace.requests == []


def test_problems_of_spec_and_place_are_told_together(workspace: FakeWorkspace) -> None:
    with pytest.raises(AirflowFailException, match=r"3 problems(.|\n)*epochs(.|\n)*base_uri(.|\n)*names no cluster"):
        validate({"epochs": 2}, base_uri=None)


def test_a_preparation_alone_needs_no_cluster_for_ranks(workspace: FakeWorkspace) -> None:
    assert validate(trains=False)["model"] == SPEC["model"]


def test_planning_needs_a_workspace() -> None:
    with pytest.raises(AirflowFailException, match="asks a workspace what it has, and none is named"):
        validate(databricks_conn_id="", base_uri="", plan="auto")
    assert validate(databricks_conn_id="", base_uri="", plan="auto", plan_options={"hardware": HARDWARE})


def test_a_name_in_the_registry_needs_a_server(workspace: FakeWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    named = {"registered_model_name": "mine"}
    with pytest.raises(AirflowFailException, match="registered_model_name = 'mine': cannot be registered"):
        validate(named, plan="auto")
    assert validate(named, plan="auto", tracking_uri="databricks")["registered_model_name"] == "mine"
    assert validate(named, trains=False)["registered_model_name"] == "mine"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow")
    assert validate(named, plan="auto")["registered_model_name"] == "mine"


def test_a_model_that_nobody_could_plan_for_is_told_before_data_is_prepared(workspace: FakeWorkspace) -> None:
    with pytest.raises(AirflowFailException, match="/home/me/model"):
        validate({"model": "/home/me/model"}, plan="auto")
    assert validate({"model": "/home/me/model"}, plan="auto", plan_options={"parameters": "7B"})
    assert validate({"model": "/Volumes/main/default/models/mine"}, plan="auto")


def test_references_to_secrets_are_left_alone() -> None:
    job = {"cluster_fields": {"spark_env_vars": {"HF_TOKEN": "{{secrets/training/hub}}", "WHO": "{{ who }}"}}}
    asked = ValidateSpecOperator(task_id="validate", job=job)
    asked.render_template_fields({"who": "me"})  # type: ignore[arg-type]
    assert asked.job["cluster_fields"]["spark_env_vars"] == {"HF_TOKEN": "{{secrets/training/hub}}", "WHO": "me"}
