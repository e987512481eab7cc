# SPDX-License-Identifier: Apache-2.0
"""A fine-tune that is handed a plan, or a DeepSpeed configuration: used as it is, or refused before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred
from deepspeed_provider.planning import Hardware
from deepspeed_provider.requested.given import planned_on_given, planned_on_given_as_json
from deepspeed_provider.requested.model_source import ModelSource
from deepspeed_provider.requested.plan import planned, planned_as_json
from deepspeed_provider.spec import FineTuneSpec
from deepspeed_provider.training.engines import check_config
from deepspeed_provider.training.plan import TrainingPlan

from operators.fake_task import FakeTask
from operators.test_finetune import DATASET, FineTune, run

ASKED = {"model": "llama-2-7b-hf", "method": "full", "tokens": "1M", "sequence_length": 1024, "cloud": "aws"}


def gpu_plan(**asked: Any) -> dict[str, Any]:
    """As a task receives it from XCom."""
    found = planned({**ASKED, "effective_batch_size": 32, **asked}, ModelSource())
    return json.loads(json.dumps(planned_as_json(found)))


def plan_of_hardware_that_is_there(**asked: Any) -> dict[str, Any]:
    """As ``deepspeed-provider plan --gpu ... --json`` prints it."""
    asked = {name: value for name, value in ASKED.items() if name != "cloud"} | {"effective_batch_size": 32} | asked
    return json.loads(json.dumps(planned_on_given_as_json(planned_on_given(asked, ModelSource()))))


PLANS = {
    "one node": gpu_plan(node_type=["p4d"], max_nodes=1),
    "offload": gpu_plan(node_type=["g5.12xlarge"], max_nodes=1),
    "several nodes": gpu_plan(node_type=["g6e.12xlarge"], objective="time"),
    "there already": plan_of_hardware_that_is_there(gpu="A100-80GB", gpus_per_node=8, ram_gib=1000),
    "fp16": gpu_plan(model="gpt2-xl", method="lora", node_type=["g4dn.12xlarge"], max_nodes=1),
}


class OnGpus(FineTune):
    """A cluster that is what the operator was told."""

    def get_hardware(self, spec: FineTuneSpec) -> Hardware:
        return Hardware(nodes=self.nodes, gpus_per_node=spec.ranks // self.nodes, use_gpu=self.use_gpu)


def spec_for(plan: dict[str, Any], **fields: Any) -> dict[str, Any]:
    settings = plan["chosen"]["settings"]
    ranks = settings["nodes"] * settings["gpus_per_node"]
    asked = {"model": "m", "method": plan["method"], "ranks": ranks, "max_steps": 3, "sequence_length": 1024}
    return FineTuneSpec.from_params({**asked, **fields}).to_params()


def operator(cluster_of: dict[str, Any], **options: Any) -> OnGpus:
    """With that plan, on the cluster that it is for."""
    nodes = cluster_of["chosen"]["settings"]["nodes"]
    asked = {"spec": spec_for(cluster_of), "dataset": DATASET, "nodes": nodes, "use_gpu": True, "plan": cluster_of}
    return OnGpus(task_id="train", **{**asked, **options})


def submitted(task: FakeTask) -> TrainingPlan:
    (found,) = task.cluster.runs.values()
    training = TrainingPlan.from_json(json.loads(json.dumps(found.request.payload)))
    assert found.request.deepspeed_config == training.deepspeed_config
    check_config(training)  # as the ranks do, before they train
    return training


def refused(made: Callable[[], OnGpus]) -> str:
    """What the task says. Nothing was submitted, or even looked at."""
    task = FakeTask()
    with pytest.raises(AirflowFailException) as caught:
        run(made(), task)
    assert task.cluster.calls == []
    assert task.record is None
    return str(caught.value)


class TestAPlan:
    @pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
    @pytest.mark.parametrize("form", [dict, json.dumps], ids=["XCom", "JSON text"])
    def test_its_settings_are_trained_with(self, plan: dict[str, Any], form: Any) -> None:
        task = FakeTask()
        run(operator(plan, plan=form(plan)), task)
        training, settings = submitted(task), plan["chosen"]["settings"]
        assert training.deepspeed_config == plan["deepspeed_config"]
        assert training.model.precision == settings["precision"]
        assert training.optimization.micro_batch_size == settings["micro_batch_size"]
        assert training.optimization.gradient_accumulation_steps == settings["gradient_accumulation_steps"]
        assert training.optimization.gradient_checkpointing == settings["gradient_checkpointing"]
        assert training.deepspeed_config["zero_optimization"]["stage"] == settings["zero_stage"]
        assert training.world_size == settings["nodes"] * settings["gpus_per_node"]
        request = next(iter(task.cluster.runs.values())).request
        assert (request.nodes, request.gpus_per_node) == (settings["nodes"], settings["gpus_per_node"])

    def test_the_plans_differ(self) -> None:
        settings = [plan["chosen"]["settings"] for plan in PLANS.values()]
        assert {"none"} < {one["offload"] for one in settings}
        assert {one["precision"] for one in settings} == {"bf16", "fp16"}
        assert len({one["nodes"] for one in settings}) > 1

    def test_the_spec_keeps_what_is_no_matter_of_machines(self) -> None:
        plan, task = PLANS["one node"], FakeTask()
        fields = {"max_gradient_norm": 0.5, "learning_rate": 3e-5, "micro_batch_size": 3, "sequence_length": 512}
        run(operator(plan, spec=spec_for(plan, **fields)), task)
        training = submitted(task)
        assert training.deepspeed_config["gradient_clipping"] == 0.5
        assert training.optimization.learning_rate == 3e-5
        assert training.optimization.sequence_length == 512
        assert training.optimization.micro_batch_size == plan["chosen"]["settings"]["micro_batch_size"]

    def test_a_run_is_found_again_whatever_the_next_plan_says(self) -> None:
        """The stored identity wins: a plan of tomorrow's prices submits nothing twice."""
        task = FakeTask()
        with pytest.raises(TaskDeferred):
            run(operator(PLANS["one node"], deferrable=True), task)
        token = task.record["handle"]["token"]
        changed = gpu_plan(node_type=["p4d"], max_nodes=1, effective_batch_size=64)
        assert changed["deepspeed_config"] != PLANS["one node"]["deepspeed_config"]
        assert run(operator(changed), task)["token"] == token
        assert submitted(task).deepspeed_config == PLANS["one node"]["deepspeed_config"]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            pytest.param(
                {"spec": {"ranks": 4}},
                ["plan = '1 x p4d.24xlarge'", "is for 1 machine with 8 GPUs", "hardware is 1 machine with 4 GPUs"],
                id="ranks",
            ),
            pytest.param({"nodes": 2}, ["1 machine with 8 GPUs", "2 machines with 4 GPUs"], id="nodes"),
            pytest.param({"use_gpu": False}, ["1 machine with 8 GPUs", "1 machine with 8 CPU processes"], id="CPU"),
            pytest.param({"spec": {"method": "lora"}}, ["method = 'lora': the plan is for full"], id="method"),
            pytest.param(
                {"spec": {"sequence_length": 2048, "effective_batch_size": 64}, "nodes": 4},
                ["sequences of 1024 tokens", "for 32 sequences a step", "4 machines with 2 GPUs", "3 problems"],
                id="all together",
            ),
        ],
    )
    def test_one_for_something_else_is_refused(self, options: dict[str, Any], said: list[str]) -> None:
        plan = PLANS["one node"]
        others = {"spec": spec_for(plan, **options.get("spec", {}))}
        text = refused(lambda: operator(plan, **{**options, **others}))
        for part in said:
            assert part in text

    def test_one_for_another_optimizer_is_refused(self) -> None:
        plan = gpu_plan(model="gpt2-xl", node_type=["p4d"], max_nodes=1, optimizer="adamw-8bit")
        text = refused(lambda: operator(plan))
        assert "optimizer = 'adamw-8bit': the plan is for adamw-8bit, and this training steps with AdamW" in text

    def test_larger_adapters_than_planned_are_refused(self) -> None:
        plan = PLANS["fp16"]
        text = refused(lambda: operator(plan, spec=spec_for(plan, lora_rank=64)))
        assert "lora_rank = 64: the plan is for adapters of rank 16" in text

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            pytest.param("{'chosen': 1}", "is not JSON", id="a mapping that a template made text"),
            pytest.param([], "is no JSON object", id="a list"),
            pytest.param({}, "is no plan of a cluster", id="empty"),
            pytest.param({"chosen": {"usd": 3}}, "is no plan of a cluster", id="a row"),
            pytest.param({"chosen": None, "model": "gpt2"}, "found nothing that fits", id="nothing fits"),
            pytest.param(
                {**PLANS["one node"], "deepspeed_config": {"train_batch_size": "auto"}},
                "plan.deepspeed_config.train_batch_size = 'auto'",
                id="a configuration that was changed",
            ),
        ],
    )
    def test_what_is_no_plan(self, given: Any, said: str) -> None:
        assert said in refused(lambda: operator(PLANS["one node"], plan=given))


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
SPEC = {"model": "m", "ranks": 2, "max_steps": 3}


def with_config(config: Any, spec: dict[str, Any] | None = None, **options: Any) -> OnGpus:
    asked = FineTuneSpec.from_params({**SPEC, **(spec or {})}).to_params()
    return OnGpus(task_id="train", spec=asked, dataset=DATASET, deepspeed_config=config, **{"use_gpu": True, **options})


class TestAConfiguration:
    @pytest.mark.parametrize("form", [dict, json.dumps], ids=["mapping", "JSON text"])
    def test_it_is_used_as_it_is(self, form: Any) -> None:
        task = FakeTask()
        run(with_config(form(CONFIG)), task)
        training = submitted(task)
        assert training.deepspeed_config == {**CONFIG, "gradient_clipping": 1.0}
        assert training.model.precision == "bf16"
        assert training.optimization.micro_batch_size == 2
        assert training.optimization.gradient_accumulation_steps == 4

    def test_the_batch_and_clipping_are_the_specs_where_it_says_nothing(self) -> None:
        task = FakeTask()
        spec = {"effective_batch_size": 24, "micro_batch_size": 3, "max_gradient_norm": 0.3}
        run(with_config({"zero_optimization": {"stage": 1}, "bf16": None}, spec), task)
        training = submitted(task)
        assert training.deepspeed_config["train_batch_size"] == 24
        assert training.deepspeed_config["gradient_clipping"] == 0.3
        assert (training.optimization.micro_batch_size, training.model.precision) == (3, "fp32")

    @pytest.mark.parametrize(
        ("config", "spec", "options", "said"),
        [
            pytest.param(
                {**CONFIG, "zero_optimisation": {"stage": 3}, "fp16": {"enabled": "auto"}},
                {},
                {},
                ["deepspeed_config.zero_optimisation", "deepspeed_config.fp16.enabled = 'auto'"],
                id="every error of the checker",
            ),
            pytest.param(
                {**CONFIG, "train_batch_size": 17}, {}, {}, ["deepspeed_config.train_batch_size = 17"], id="triple"
            ),
            pytest.param(
                CONFIG,
                {"micro_batch_size": 4, "effective_batch_size": 8},
                {},
                ["deepspeed_config.train_micro_batch_size_per_gpu = 2: contradicts the spec, whose micro_batch_size"],
                id="another batch than the spec's",
            ),
            pytest.param(CONFIG, {"effective_batch_size": 8}, {}, ["effective_batch_size = 8"], id="another product"),
            pytest.param(
                {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}},
                {},
                {"use_gpu": False},
                ["deepspeed_config.fp16"],
                id="fp16 on CPU",
            ),
            pytest.param(
                {"train_micro_batch_size_per_gpu": 1, "bfloat16": {"enabled": True}},
                {},
                {},
                ["deepspeed_config.bfloat16", "Use 'bf16'"],
                id="a name that the training does not read",
            ),
            pytest.param("[1]", {}, {}, ["deepspeed_config = '[1]': is no JSON object"], id="a list"),
        ],
    )
    def test_what_cannot_work_is_refused(
        self, config: Any, spec: dict[str, Any], options: dict[str, Any], said: list[str]
    ) -> None:
        text = refused(lambda: with_config(config, spec, **options))
        for part in said:
            assert part in text

    def test_a_secret_is_neither_stored_nor_repeated(self) -> None:
        config = {**CONFIG, "comet": {"enabled": True, "api_key": "hunter2"}}
        text = refused(lambda: with_config(config))
        assert "deepspeed_config.comet.api_key = '(hidden)'" in text
        assert "hunter2" not in text

    def test_a_plan_and_a_configuration_contradict_each_other(self) -> None:
        with pytest.raises(ValueError, match="Give one of them"):
            with_config(CONFIG, plan=PLANS["one node"])


def test_both_are_rendered() -> None:
    assert {"plan", "deepspeed_config", "spec", "dataset", "base_uri"} <= set(OnGpus.template_fields)
