# SPDX-License-Identifier: Apache-2.0
"""Fine-tune and evaluation that take their cluster from a plan, through the Jobs API of a fake workspace."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from deepspeed_provider.operators.finetune import DeepSpeedEvaluateOperator, DeepSpeedFineTuneOperator
from deepspeed_provider.operators.training_job import PLAN_KEY
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.testing import endings
from deepspeed_provider.testing.workspace import FakeWorkspace
from deepspeed_provider.training.plan import TrainingPlan

from operators.fake_task import FakeTask
from operators.test_finetune_handover import PLANS, gpu_plan

DATASET = {"dataset_uri": "/Volumes/main/ml/data", "splits": {"train": {"rows": 1000}, "heldout": {"rows": 100}}}
LORA = {"model": "llama-2-7b-hf", "method": "lora", "max_steps": 3, "sequence_length": 1024}
FULL = {**LORA, "method": "full"}
PLAN = gpu_plan(method="lora", node_type=["g5.12xlarge"], max_nodes=1, single_user_name="trainers", tags="team=ml")
AUTO = {"plan": "auto", "plan_options": {"node_type": ["g5.12xlarge"], "max_nodes": 1}}
OWN = {"spark_version": "16.4.x-gpu-ml-scala2.12", "node_type_id": "g5.12xlarge", "num_workers": 0}


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with FakeWorkspace() as found:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", found.connection_json)
        yield found


def operator(kind: type[Any] = DeepSpeedFineTuneOperator, **options: Any) -> Any:
    asked = {"spec": LORA, "dataset": DATASET, "base_uri": "/Volumes/main/ml/runs", "poll_interval": 60.0, "retries": 1}
    return kind(task_id="train", databricks_conn_id="databricks_default", **{**asked, **options})


def evaluation(**options: Any) -> Any:
    return operator(DeepSpeedEvaluateOperator, **{"finetuned": "/Volumes/main/ml/tuned", **options})


def run(asked: Any, workspace: FakeWorkspace, task: FakeTask | None = None) -> Any:
    task = task or FakeTask()
    task.try_number += 1
    asked.clock, asked.sleep = lambda: workspace.clock.now_ms / 1000, workspace.advance
    return asked.execute(task.context())


def job_task(workspace: FakeWorkspace) -> dict[str, Any]:
    """The task of the newest run."""
    (task,) = workspace.runs[-1].body["tasks"]
    return task


def request(workspace: FakeWorkspace) -> dict[str, Any]:
    """What its driver side was sent."""
    (place,) = job_task(workspace)["spark_python_task"]["parameters"]
    return json.loads(workspace.files.contents[place])


def refused(asked: Any, workspace: FakeWorkspace) -> str:
    """What the task says; nothing was minted, uploaded or submitted."""
    task, before = FakeTask(), len(workspace.requests)
    with pytest.raises(AirflowFailException) as caught:
        run(asked, workspace, task)
    assert task.record is None
    assert not [one.path for one in workspace.requests[before:] if one.method != "GET"]
    return str(caught.value)


class TestAHandedPlan:
    @pytest.mark.parametrize("form", [dict, json.dumps], ids=["XCom", "JSON text"])
    def test_its_cluster_is_made_and_the_ranks_follow(self, workspace: FakeWorkspace, form: Any) -> None:
        run(operator(plan=form(PLAN)), workspace)
        cluster, sent = job_task(workspace)["new_cluster"], request(workspace)
        assert {**cluster, "custom_tags": PLAN["cluster"]["custom_tags"]} == PLAN["cluster"]
        assert cluster["single_user_name"] == "trainers"
        assert cluster["custom_tags"] == {
            "ResourceClass": "SingleNode",
            "team": "ml",
            "airflow_dag_id": "dag",
            "airflow_run_id": "manual__1",
            "airflow_task_id": "train",
        }
        assert (sent["nodes"], sent["gpus_per_node"], sent["use_gpu"]) == (1, 4, True)
        training = TrainingPlan.from_json(sent["payload"])
        assert training.world_size == 4
        assert training.deepspeed_config == sent["deepspeed_config"] == PLAN["deepspeed_config"]

    def test_several_nodes(self, workspace: FakeWorkspace) -> None:
        plan = PLANS["several nodes"]
        run(operator(spec=FULL, plan=plan), workspace)
        nodes = plan["chosen"]["nodes"]
        assert nodes > 1
        assert (job_task(workspace)["new_cluster"]["num_workers"], request(workspace)["nodes"]) == (nodes, nodes)

    @pytest.mark.parametrize(
        "spec",
        [
            pytest.param({"ranks": 1}, id="ranks of a form's default"),
            pytest.param({"micro_batch_size": 5, "gradient_accumulation_steps": 7}, id="another split of the batch"),
            pytest.param({"effective_batch_size": 32, "micro_batch_size": 32}, id="a split for one rank"),
        ],
    )
    def test_what_the_spec_says_of_ranks_gives_way(self, workspace: FakeWorkspace, spec: dict[str, Any]) -> None:
        run(operator(spec={**LORA, **spec}, plan=PLAN), workspace)
        training = TrainingPlan.from_json(request(workspace)["payload"])
        settings = PLAN["chosen"]["settings"]
        assert training.world_size == 4
        assert training.optimization.micro_batch_size == settings["micro_batch_size"]

    def test_settings_of_the_users_own_come_along(self, workspace: FakeWorkspace) -> None:
        job = {"run_fields": {"budget_policy_id": "b1"}, "cluster_fields": {"custom_tags": {"cost": "7"}}}
        run(operator(plan=PLAN, job=job), workspace)
        assert workspace.runs[-1].body["budget_policy_id"] == "b1"
        assert job_task(workspace)["new_cluster"]["custom_tags"]["cost"] == "7"

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            pytest.param({}, "job = None: names no cluster, and there is no plan. Give plan='auto'", id="nothing"),
            pytest.param({"plan": ""}, "job = None: names no cluster", id="a Param that is empty"),
            pytest.param(
                {"plan": PLANS["there already"]},
                "plan = '1 x 8 A100-80GB': is for hardware that is there, and names no cluster",
                id="a plan for hardware that is there",
            ),
            pytest.param(
                {"plan": gpu_plan(method="lora", spark_version="15.4.x-gpu-ml-scala2.12")},
                "holds transformers 4.41.2 and DeepSpeed 0.14.4; the training needs transformers 4.50 and DeepSpeed "
                "0.16. Plan with spark_version '17.3.x-gpu-ml-scala2.13'",
                id="a runtime that is too old",
            ),
            pytest.param({"plan": PLAN, "spec": FULL}, "method = 'full': the plan is for lora", id="another training"),
            pytest.param({"plan": PLAN, "job": {"clutser": OWN}}, "Did you mean 'cluster'?", id="job"),
            pytest.param(
                {"plan": PLAN, "plan_options": {"budget_usd": 5}},
                "plan_options = {'budget_usd': 5}: are for planning, and nothing is planned here",
                id="options without planning",
            ),
        ],
    )
    def test_what_cannot_run_leaves_no_trace(
        self, workspace: FakeWorkspace, options: dict[str, Any], said: str
    ) -> None:
        assert said in refused(operator(**options), workspace)


class TestOnesOwnCluster:
    def test_one_that_is_there_is_used_as_the_spec_has_it(self, workspace: FakeWorkspace) -> None:
        workspace.clusters.add("0101-120000-abc")
        job = {"existing_cluster_id": "0101-120000-abc"}
        run(operator(spec={**LORA, "ranks": 8}, nodes=2, use_gpu=True, job=job), workspace)
        sent = request(workspace)
        assert (sent["nodes"], sent["gpus_per_node"]) == (2, 4)
        assert "new_cluster" not in job_task(workspace)
        assert "libraries" not in job_task(workspace), "others use it too"

    def test_a_plan_for_just_that_hardware_gives_its_settings(self, workspace: FakeWorkspace) -> None:
        options = {"job": {"cluster": OWN}, "plan": PLAN, "use_gpu": True}
        run(operator(spec={**LORA, "ranks": 4}, **options), workspace)
        assert job_task(workspace)["new_cluster"] == OWN
        assert request(workspace)["deepspeed_config"] == PLAN["deepspeed_config"]
        said = refused(operator(spec={**LORA, "ranks": 2}, **options), workspace)
        assert "the connection's hardware is 1 machine with 2 GPUs" in said

    @pytest.mark.parametrize("name", ["cluster", "existing_cluster_id"])
    def test_a_plan_of_the_tasks_own_contradicts_it(self, workspace: FakeWorkspace, name: str) -> None:
        job = {name: {"cluster": OWN, "existing_cluster_id": "c1"}[name]}
        assert f"plan = 'auto': chooses a cluster, and job names one ({name})" in refused(
            operator(**AUTO, job=job), workspace
        )


PEFT = {"pypi": {"package": "peft==0.15.2"}}
WHEEL = {"whl": "/Volumes/main/ml/mine.whl"}


@pytest.mark.parametrize(
    ("options", "libraries"),
    [
        pytest.param({"plan": PLAN}, [PEFT], id="LoRA"),
        pytest.param({"plan": PLANS["several nodes"], "spec": FULL}, None, id="full"),
        pytest.param(
            {"job": {"cluster": OWN}, "use_gpu": True, "spec": {**LORA, "ranks": 4}}, [PEFT], id="own cluster"
        ),
        pytest.param({"plan": PLAN, "job": {"libraries": [WHEEL]}}, [PEFT, WHEEL], id="beside the user's"),
        pytest.param(
            {"plan": PLAN, "job": {"libraries": [{"pypi": {"package": "PEFT[x] >= 0.16"}}]}},
            [{"pypi": {"package": "PEFT[x] >= 0.16"}}],
            id="the user's own version",
        ),
    ],
)
def test_the_task_installs_what_the_runtime_lacks(
    workspace: FakeWorkspace, options: dict[str, Any], libraries: list[Any] | None
) -> None:
    run(operator(**options), workspace)
    assert job_task(workspace).get("libraries") == libraries


class TestAutomaticPlan:
    def test_it_is_made_for_the_workspace_shown_and_used(self, workspace: FakeWorkspace) -> None:
        task = FakeTask()
        output = run(operator(**AUTO), workspace, task)
        assert job_task(workspace)["new_cluster"]["node_type_id"] == "g5.12xlarge"
        assert task.xcoms["markdown"].startswith("### llama-2-7b-hf\n")
        assert "Candidates, cheapest first" in task.xcoms["markdown"]
        assert output["plan"]["chosen"]["node_type_id"] == "g5.12xlarge"
        assert len(workspace.requests_for("clusters/list-node-types")) == 1

    @pytest.mark.parametrize(
        ("spec", "said"),
        [
            pytest.param(LORA, "3 optimizer steps of 64 sequences of 1,024 tokens", id="steps"),
            pytest.param({**LORA, "effective_batch_size": 16}, "3 optimizer steps of 16 sequences", id="batch"),
            pytest.param({**LORA, "max_steps": None}, "16 optimizer steps of 64", id="one epoch of the data set"),
            pytest.param({**LORA, "max_steps": None, "epochs": 2.5}, "40 optimizer steps of 64", id="epochs"),
        ],
    )
    def test_it_is_of_the_spec(self, workspace: FakeWorkspace, spec: dict[str, Any], said: str) -> None:
        task = FakeTask()
        run(operator(spec=spec, **AUTO), workspace, task)
        assert said in task.xcoms["markdown"]

    def test_a_run_that_is_taken_up_keeps_its_plan(self, workspace: FakeWorkspace) -> None:
        """Its own machines may be what the workspace lacks now, and must not be taken for a problem."""
        task = FakeTask()
        with pytest.raises(TaskDeferred):
            run(operator(**AUTO, deferrable=True), workspace, task)
        workspace.node_types.clear()
        output = run(operator(**AUTO), workspace, task)
        assert output["token"] == workspace.runs[0].token
        assert len(workspace.runs) == 1
        assert workspace.runs[0].cancels == 0
        assert len(workspace.requests_for("clusters/list-node-types")) == 1

    def test_a_retry_after_a_failure_plans_anew(self, workspace: FakeWorkspace) -> None:
        task = FakeTask()
        workspace.next_run(endings.stock_out())
        options = {"plan": "auto", "plan_options": {"max_nodes": 1}}
        with pytest.raises(AirflowException, match="CAPACITY"):
            run(operator(**options), workspace, task)
        first = task.store.get(PLAN_KEY)["chosen"]["node_type_id"]
        workspace.node_types[:] = [entry for entry in workspace.node_types if entry["node_type_id"] != first]
        run(operator(**options), workspace, task)
        assert job_task(workspace)["new_cluster"]["node_type_id"] != first

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            pytest.param({**AUTO, "plan_options": {"budget_usd": 0.01}}, "It would fit with a budget of", id="budget"),
            pytest.param(
                {**AUTO, "plan_options": {"nod_type": "p4d"}, "spec": {**LORA, "model": "llama-2-7b-hff"}},
                "Did you mean 'node_type'?",
                id="an option that is none",
            ),
            pytest.param({**AUTO, "plan_options": [1]}, "plan_options = [1]: is no JSON object", id="no options"),
            pytest.param(
                {**AUTO, "spec": {**LORA, "max_steps": None}, "dataset": "/Volumes/main/ml/data"},
                "max_steps = None: is needed: nothing else says how long the training is",
                id="rows that nobody counted",
            ),
            pytest.param(
                {**AUTO, "spec": {**LORA, "model": "/Volumes/main/ml/none"}},
                "model = '/Volumes/main/ml/none': has no config.json in the workspace",
                id="no such model",
            ),
            pytest.param(
                {**AUTO, "databricks_conn_id": None},
                "plan = 'auto': asks a workspace what it has, and none is named. Give databricks_conn_id",
                id="no workspace",
            ),
        ],
    )
    def test_what_cannot_be_planned_leaves_no_trace(
        self, workspace: FakeWorkspace, options: dict[str, Any], said: str
    ) -> None:
        asked = DeepSpeedFineTuneOperator(
            **{
                **{"task_id": "train", "spec": LORA, "dataset": DATASET, "base_uri": "/Volumes/main/ml/runs"},
                **{"databricks_conn_id": "databricks_default", **options},
            }
        )
        assert said in refused(asked, workspace)

    def test_a_model_and_rows_that_only_the_cluster_knows(self, workspace: FakeWorkspace) -> None:
        spec = {**LORA, "model": "/Volumes/main/ml/llama", "max_steps": None}
        options = {**AUTO["plan_options"], "parameters": "7B", "rows": 5000}
        run(operator(spec=spec, dataset="/Volumes/main/ml/data", plan="auto", plan_options=options), workspace)
        assert TrainingPlan.from_json(request(workspace)["payload"]).model.ref == "/Volumes/main/ml/llama"

    def test_a_models_folder_in_a_volume_is_read_there(self, workspace: FakeWorkspace) -> None:
        config = json.dumps(model_config("meta-llama/Llama-2-7b-hf"))
        workspace.files.write("/Volumes/main/ml/llama/config.json", config.encode())
        task = FakeTask()
        run(operator(spec={**LORA, "model": "/Volumes/main/ml/llama/"}, **AUTO), workspace, task)
        assert TrainingPlan.from_json(request(workspace)["payload"]).model.ref == "/Volumes/main/ml/llama/"
        by_name = FakeTask()
        run(operator(spec={**LORA, "model": "meta-llama/Llama-2-7b-hf"}, **AUTO), workspace, by_name)
        assert job_task(workspace)["new_cluster"]["node_type_id"] == task.store.get(PLAN_KEY)["chosen"]["node_type_id"]


class TestEvaluation:
    def test_it_gets_a_cluster_as_the_finetune_had(self, workspace: FakeWorkspace) -> None:
        tuned = run(operator(plan=PLAN), workspace)
        task = FakeTask()
        output = run(evaluation(finetuned=json.loads(json.dumps(tuned))), workspace, task)
        assert {**job_task(workspace)["new_cluster"], "custom_tags": {}} == {**PLAN["cluster"], "custom_tags": {}}
        training = TrainingPlan.from_json(request(workspace)["payload"])
        assert (training.world_size, training.evaluation.tuned_uri) == (4, tuned["model_uri"])
        assert output["cost_usd"] > 0

    @pytest.mark.parametrize("plan", ["auto", None], ids=str)
    def test_the_finetunes_cluster_goes_before_a_plan_of_its_own(
        self, workspace: FakeWorkspace, plan: str | None
    ) -> None:
        tuned = run(operator(**AUTO), workspace)
        options = {**AUTO, "plan": plan} if plan else {}
        run(evaluation(finetuned=tuned, **options), workspace)
        assert len(workspace.requests_for("clusters/list-node-types")) == 1
        assert job_task(workspace)["new_cluster"]["node_type_id"] == "g5.12xlarge"

    def test_a_plan_of_another_training_does_for_its_cluster(self, workspace: FakeWorkspace) -> None:
        tuned = run(operator(plan=PLAN), workspace)
        spec = {**LORA, "effective_batch_size": 12}
        run(evaluation(finetuned=tuned, plan=PLANS["one node"], spec=spec), workspace)
        assert job_task(workspace)["new_cluster"]["node_type_id"] == "p4d.24xlarge"
        assert request(workspace)["deepspeed_config"] is None

    def test_it_computes_as_its_gpus_do(self, workspace: FakeWorkspace) -> None:
        run(evaluation(plan=PLANS["fp16"]), workspace)
        assert TrainingPlan.from_json(request(workspace)["payload"]).model.precision == "fp16"

    def test_without_any_there_is_one_clear_error(self, workspace: FakeWorkspace) -> None:
        assert "job = None: names no cluster, and there is no plan" in refused(evaluation(), workspace)


class TestCost:
    USD_PER_HOUR = PLAN["chosen"]["usd_per_hour"]

    def test_so_far_and_at_the_end_by_the_time_that_really_passed(
        self, workspace: FakeWorkspace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        workspace.next_run(queue_s=600.0, start_s=300.0, run_s=3000.0, stop_s=0.0)
        output = run(operator(plan=PLAN), workspace)
        said = capsys.readouterr().out
        so_far = [float(cost) for cost in re.findall(r"So far: \$([\d.]+) for", said)]
        assert 8 <= len(so_far) <= 12, "now and then"
        assert so_far == sorted(so_far)
        assert output["billed_seconds"] == pytest.approx(3300, abs=1), "the start counts, the queue does not"
        assert output["cost_usd"] == pytest.approx(3300 / 3600 * self.USD_PER_HOUR, rel=0.001)
        assert f"Cost of the run: ${output['cost_usd']:,.2f} for 55 min of the cluster at" in said

    def test_a_failed_run_has_cost_something_too(
        self, workspace: FakeWorkspace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        workspace.next_run(endings.fails("ValueError: no rows"), run_s=3600.0)
        with pytest.raises(AirflowException, match="no rows"):
            run(operator(plan=PLAN), workspace)
        assert "Cost of the run: $" in capsys.readouterr().out

    def test_where_no_price_is_known_there_is_the_time(self, workspace: FakeWorkspace) -> None:
        workspace.clusters.add("c1")
        output = run(operator(job={"existing_cluster_id": "c1"}, use_gpu=True), workspace)
        assert output["billed_seconds"] > 0
        assert output["cost_usd"] is None

    def test_the_trigger_knows_the_price(self, workspace: FakeWorkspace) -> None:
        with pytest.raises(TaskDeferred) as deferred:
            run(operator(plan=PLAN, deferrable=True), workspace)
        _, kwargs = deferred.value.trigger.serialize()
        assert kwargs["usd_per_hour"] == self.USD_PER_HOUR


def test_spec_job_and_plan_are_judged_together(workspace: FakeWorkspace) -> None:
    asked = operator(spec={**LORA, "max_steps": -1}, job={"clustr": {}}, plan=PLAN, plan_options={"budget_usd": 5})
    with pytest.raises(AirflowFailException) as caught:
        run(asked, workspace)
    said = [text for text in ("max_steps = -1", "job.clustr = {}", "plan_options = {") if text in str(caught.value)]
    assert len(said) == 3, caught.value
