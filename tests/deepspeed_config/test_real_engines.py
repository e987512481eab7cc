# SPDX-License-Identifier: Apache-2.0
"""Generated configurations start real engines: two ranks, as far as a CPU can run them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from deepspeed_provider.deepspeed_config.generate import BatchTriple, EngineSettings, deepspeed_config
from deepspeed_provider.sizing.options import Offload
from deepspeed_provider.training.plan import TrainingPlan
from training import tiny_runs

BATCH = BatchTriple(micro_batch_size=2, gradient_accumulation_steps=2, world_size=2)
# Not fp16 and not NVMe: DeepSpeed's CPU accelerator has neither.
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0, "precision": "fp32"},
    "stage 1 in bf16": {"zero_stage": 1, "precision": "bf16"},
    "stage 2": {"zero_stage": 2, "precision": "fp32"},
    "stage 2 in bf16, optimizer in host memory": {
        "zero_stage": 2,
        "precision": "bf16",
        "offload": Offload.OPTIMIZER,
    },
    "stage 3": {"zero_stage": 3, "precision": "fp32"},
    "stage 3 in bf16, parameters in host memory": {
        "zero_stage": 3,
        "precision": "bf16",
        "offload": Offload.PARAMETERS,
    },
    "stage 3, all in host memory": {"zero_stage": 3, "precision": "fp32", "offload": Offload.ALL},
}


def plan(case: dict[str, Any], output: Path, model: Path, dataset: Path) -> TrainingPlan:
    generated = deepspeed_config(
        EngineSettings(
            batch=BATCH,
            gradient_clipping=1.0,
            use_gpu=False,
            hidden_size=64,
            parameters=93_000,
            trained_parameters=93_000,
            **case,
        )
    )
    made = tiny_runs.plan(
        output,
        model,
        dataset,
        micro=BATCH.micro_batch_size,
        accumulation=BATCH.gradient_accumulation_steps,
        precision=case["precision"],
        optimization={"max_steps": 2},
    )
    return dataclasses.replace(made, deepspeed_config=generated)


# DeepSpeed would first compile its CPU Adam, for minutes of two cores; the training then steps with torch's.
NO_COMPILER = """
os.environ.update(CXX="/nowhere/g++", PATH="/nowhere", TORCH_EXTENSIONS_DIR="extensions")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_generated_configurations_train_and_all_to_the_same_loss(tmp_path: Path) -> None:
    model, dataset = tiny_runs.make_model(tmp_path / "model"), tiny_runs.make_dataset(tmp_path / "data")
    plans = [plan(case, tmp_path / f"out{number}", model, dataset) for number, case in enumerate(CASES.values())]
    offloading = [number for number, case in enumerate(CASES.values()) if "offload" in case]
    outcomes = tiny_runs.torchrun_many(plans, tmp_path / "scratch", sabotage=dict.fromkeys(offloading, NO_COMPILER))
    by_name = dict(zip(CASES, outcomes, strict=True))
    assert {name: outcome.text[-2000:] for name, outcome in by_name.items() if outcome.returncode != 0} == {}
    losses = {name: outcome.returned[0]["metrics"]["train_loss"] for name, outcome in by_name.items()}
    for name, loss in losses.items():
        accuracy = 1e-5 if CASES[name]["precision"] == "fp32" else 1e-2
        assert loss == pytest.approx(losses["stage 0"], rel=accuracy), name
        assert (by_name[name].output / "model" / "model.safetensors").exists()
