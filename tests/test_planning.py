# SPDX-License-Identifier: Apache-2.0
"""From a spec and the hardware to what the ranks receive."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepspeed_provider.errors import SpecError
from deepspeed_provider.planning import Hardware, evaluation_plan, finetune_plan, plan
from deepspeed_provider.spec import FineTuneSpec, Precision
from deepspeed_provider.training.plan import EvaluationSettings, TrackingSettings, TrainingPlan

LAPTOP = Hardware(gpus_per_node=2, use_gpu=False, cores=2, host_bytes=8 * 2**30)
PLACES = {"token": "t", "dataset_uri": "file:///d", "output_uri": "file:///o", "cache_uri": "file:///c"}


def spec(**params: Any) -> FineTuneSpec:
    return FineTuneSpec.from_params({"model": "m", "ranks": 2, **params})


@pytest.mark.parametrize(
    ("asked", "hardware", "precision"),
    [
        pytest.param("auto", LAPTOP, Precision.FP32, id="CPU"),
        pytest.param("auto", Hardware(gpus_per_node=2), Precision.BF16, id="Ampere and later"),
        pytest.param("auto", Hardware(gpus_per_node=2, bf16=False), Precision.FP16, id="Volta, Turing"),
        pytest.param("bf16", LAPTOP, Precision.BF16, id="asked for on CPU"),
        pytest.param("fp32", Hardware(gpus_per_node=2), Precision.FP32, id="asked for on GPU"),
    ],
)
def test_precision(asked: str, hardware: Hardware, precision: Precision) -> None:
    made = plan(spec(precision=asked), hardware)
    assert made.precision is precision
    assert made.deepspeed_config["bf16"]["enabled"] == (precision is Precision.BF16)
    assert made.deepspeed_config["fp16"]["enabled"] == (precision is Precision.FP16)


@pytest.mark.parametrize(
    ("params", "hardware", "text"),
    [
        pytest.param({"precision": "fp16"}, LAPTOP, "does not train in fp16 on CPU", id="fp16 on CPU"),
        pytest.param({"precision": "bf16"}, Hardware(gpus_per_node=2, bf16=False), "no bfloat16", id="bf16 on Volta"),
        pytest.param({"ranks": 3}, LAPTOP, "does not match the hardware, which holds 2", id="ranks"),
    ],
)
def test_misfits_are_refused(params: dict[str, Any], hardware: Hardware, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        plan(spec(**params), hardware)


def test_misfits_are_told_together() -> None:
    with pytest.raises(SpecError, match="2 problems"):
        plan(spec(ranks=3, precision="fp16"), LAPTOP)


def test_reasons_are_for_people() -> None:
    made = plan(spec(effective_batch_size=4, max_steps=60), LAPTOP)
    assert made.reasons == (
        "Runs on 1 machine with 2 CPU processes, 2 cores, 8 GiB of memory.",
        "Precision fp32: most CPUs compute bf16 and fp16 slower than fp32.",
        "ZeRO stage 2: optimizer states and gradients are split over 2 ranks; weights stay whole.",
        "Effective batch 4 = micro batch 2 x 1 accumulation step x 2 ranks.",
        "LoRA of rank 16 on every linear layer but the head: only the adapter is trained, learning rate 0.0005 "
        "(usual for the method).",
        "Ends after 60 optimizer steps, as asked.",
    )


def test_what_the_ranks_of_a_finetune_receive() -> None:
    made = plan(spec(max_steps=5, learning_rate=1e-4, effective_batch_size=8, lora_targets="q_proj"), LAPTOP)
    tracking = TrackingSettings(tracking_uri="http://m", run_id="r")
    training = finetune_plan(made, **PLACES, tracking=tracking)
    assert TrainingPlan.from_json(json.loads(json.dumps(training.to_json()))) == training
    assert (training.job, training.world_size, training.use_gpu) == ("finetune", 2, False)
    assert (training.optimization.max_steps, training.optimization.epochs) == (5, None)
    assert training.method.lora_targets == ("q_proj",)
    assert training.model.precision == "fp32"
    assert training.deepspeed_config["train_batch_size"] == 8


def test_what_the_ranks_of_an_evaluation_receive() -> None:
    made = plan(spec(evaluation_rows=7), LAPTOP)
    training = evaluation_plan(made, EvaluationSettings(tuned_uri="file:///m", rows=7), **PLACES)
    assert TrainingPlan.from_json(json.loads(json.dumps(training.to_json()))) == training
    assert (training.job, training.deepspeed_config) == ("evaluate", {})
    assert training.evaluation == EvaluationSettings(tuned_uri="file:///m", rows=7)
