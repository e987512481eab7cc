# SPDX-License-Identifier: Apache-2.0
"""Fine-tune and evaluation that plan by themselves for machines that are there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred
from deepspeed_provider.requested.finetune import OF_OUR_TRAINING
from deepspeed_provider.requested.given import planned_on_given, planned_on_given_as_json
from deepspeed_provider.requested.model_source import ModelSource
from deepspeed_provider.testing.workspace import FakeWorkspace
from deepspeed_provider.training.plan import TrainingPlan

from operators import test_finetune, test_finetune_planned
from operators.fake_task import FakeTask
from operators.test_finetune_planned import DATASET, FULL, workspace  # noqa: F401  (a fixture)

EIGHT = {"gpu": "A100-80GB", "gpus_per_node": 8, "ram_gib": 1000, "usd_per_hour": 20.0}
PLANNED = {"plan": "auto", "plan_options": {"hardware": EIGHT}}
ON_CLUSTER = {**PLANNED, "job": {"existing_cluster_id": "0101-120000-abc"}}


def finetune(**options: Any) -> Any:
    return test_finetune.FineTune(task_id="train", **{"spec": FULL, "dataset": DATASET, **PLANNED, **options})


def expected(**hardware: Any) -> dict[str, Any]:
    """What the command line says of these machines."""
    asked = {"model": "llama-2-7b-hf", "method": "full", "sequence_length": 1024, "rows": 3 * 64, **OF_OUR_TRAINING}
    return planned_on_given_as_json(planned_on_given({**asked, **EIGHT, **hardware}, ModelSource()))


def submitted(task: FakeTask, number: int = 0) -> Any:
    return list(task.cluster.runs.values())[number].request


@pytest.mark.parametrize("hardware", [{}, {"nodes": 2, "gpus_per_node": "4"}], ids=["one node", "several"])
def test_over_spark_connect_settings_and_ranks_follow_the_machines(hardware: dict[str, Any]) -> None:
    task, described = FakeTask(), {**EIGHT, **hardware}
    output = test_finetune.run(finetune(plan_options={"hardware": described}), task)
    request, plan = submitted(task), expected(**hardware)
    settings = plan["chosen"]["settings"]
    assert (request.nodes, request.gpus_per_node, request.use_gpu) == (
        settings["nodes"],
        settings["gpus_per_node"],
        True,
    )
    training = TrainingPlan.from_json(json.loads(json.dumps(request.payload)))
    assert training.world_size == 8
    assert training.optimization.micro_batch_size == settings["micro_batch_size"]
    assert training.deepspeed_config["zero_optimization"] == plan["deepspeed_config"]["zero_optimization"]
    assert task.xcoms["markdown"].startswith("### llama-2-7b-hf\n")
    assert output["plan"]["cluster"] is None


def evaluation(finetuned: Any, **options: Any) -> Any:
    asked = {"spec": FULL, "dataset": DATASET, "finetuned": finetuned, **options}
    return test_finetune.Evaluate(task_id="train", **asked)


ONE = {"gpu": "L4", "gpus_per_node": 1}
ELSEWHERE = {"plan": "auto", "plan_options": {"hardware": ONE}}


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        pytest.param({}, 8, id="the fine-tune's"),
        pytest.param(PLANNED, 8, id="the same arguments"),
        pytest.param({"plan": "auto"}, 8, id="auto"),
        pytest.param(ELSEWHERE, 1, id="others, on which the training would not fit"),
    ],
)
def test_an_evaluation_runs_on_the_finetunes_machines_unless_it_has_its_own(options: dict[str, Any], gpus: int) -> None:
    task, tuned = FakeTask(), FakeTask()
    plan = test_finetune.run(finetune(), tuned)["plan"]
    test_finetune.run(evaluation({"model_uri": "mem://tuned", "plan": plan}, **options), task)
    assert (submitted(task).gpus_per_node, submitted(task).use_gpu) == (gpus, True)


@pytest.mark.parametrize(("asked", "used"), [({}, 1), ({"micro_batch_size": 4, "effective_batch_size": 32}, 4)])
def test_an_evaluation_alone(asked: dict[str, Any], used: int) -> None:
    task = FakeTask()
    test_finetune.run(evaluation("mem://tuned", **{**ELSEWHERE, "spec": {**FULL, **asked}}), task)
    assert submitted(task).gpus_per_node == 1
    assert TrainingPlan.from_json(submitted(task).payload).optimization.micro_batch_size == used
    with pytest.raises(AirflowFailException, match=r"hardware\.gpus = 1: there is no such option"):
        test_finetune.run(evaluation("mem://tuned", plan="auto", plan_options={"hardware": {"gpus": 1}}), FakeTask())


@pytest.mark.parametrize("form", [dict, json.dumps], ids=["XCom", "JSON text"])
def test_a_plan_of_such_machines_that_is_handed_over_does_the_same(form: Any, workspace: FakeWorkspace) -> None:  # noqa: F811
    task, plan = FakeTask(), json.loads(json.dumps(expected()))
    test_finetune.run(finetune(plan=form(plan), plan_options=None), task)
    assert (submitted(task).gpus_per_node, submitted(task).use_gpu) == (8, True)
    workspace.clusters.add("0101-120000-abc")
    handed = {**ON_CLUSTER, "plan": form(plan), "plan_options": None}
    output = test_finetune_planned.run(test_finetune_planned.operator(spec=FULL, **handed), workspace)
    assert test_finetune_planned.request(workspace)["gpus_per_node"] == 8
    assert output["plan"]["chosen"]["usd_per_hour"] == 20.0


def test_a_run_that_is_taken_up_keeps_its_plan() -> None:
    """Whoever edits the hardware meanwhile gets it with the next run."""
    task = FakeTask()
    with pytest.raises(TaskDeferred):
        test_finetune.run(finetune(deferrable=True), task)
    edited = finetune(plan_options={"hardware": {**EIGHT, "gpus_per_node": 4}})
    assert test_finetune.run(edited, task)["plan"]["chosen"]["settings"]["gpus_per_node"] == 8
    assert len(task.cluster.runs) == 1


def test_on_a_cluster_of_ones_own_it_costs_what_was_said(workspace: FakeWorkspace) -> None:  # noqa: F811
    workspace.clusters.add("0101-120000-abc")
    output = test_finetune_planned.run(test_finetune_planned.operator(spec=FULL, **ON_CLUSTER), workspace)
    sent = test_finetune_planned.request(workspace)
    assert (sent["nodes"], sent["gpus_per_node"], sent["use_gpu"]) == (1, 8, True)
    assert test_finetune_planned.job_task(workspace)["existing_cluster_id"] == "0101-120000-abc"
    assert output["plan"]["chosen"]["usd_per_hour"] == 20.0
    assert not [one for one in workspace.requests if "list-node-types" in one.path]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            {"plan_options": {"hardware": {"gpu": "A1000", "gpus": 8}, "top": 3}},
            [
                "hardware.gpus = 8: there is no such option",
                "hardware.gpu = 'A1000'",
                "hardware.gpus_per_node = None",
                "top = 3",
            ],
            id="all at once",
        ),
        pytest.param(
            {"plan_options": {"hardware": {"gpu": "T4", "gpus_per_node": 1}}},
            ["llama-2-7b-hf does not fit 1 x 1 T4. Nearest: "],
            id="too small",
        ),
        pytest.param({"plan_options": {"hardware": {}}}, ["hardware.gpu = None: is missing"], id="no word of it"),
        pytest.param({"plan_options": {"hardware": "A100"}}, ["hardware = 'A100': is not JSON"], id="a word"),
        pytest.param({"plan_options": None}, ["plan = 'auto': asks a workspace", "'hardware': {"], id="nothing"),
        pytest.param({"plan_options": "x"}, ["plan_options = 'x': is not JSON"], id="no mapping"),
        pytest.param(
            {"spec": {**FULL, "effective_batch_size": 12}}, ["effective_batch_size = 12: does not divide"], id="batch"
        ),
    ],
)
def test_what_cannot_be_planned_leaves_no_trace(options: dict[str, Any], said: list[str]) -> None:
    task = FakeTask()
    with pytest.raises(AirflowFailException) as caught:
        test_finetune.run(finetune(**options), task)
    for text in said:
        assert text in str(caught.value)
    assert task.record is None
    assert task.cluster.calls == []


def test_hardware_is_of_a_cluster_that_is_named(workspace: FakeWorkspace) -> None:  # noqa: F811
    said = test_finetune_planned.refused(test_finetune_planned.operator(**PLANNED), workspace)
    assert "plan_options.hardware = " in said
    assert "job names none. Give job={'existing_cluster_id': …}" in said
