# SPDX-License-Identifier: Apache-2.0
"""Real two-rank DeepSpeed runs of a tiny model under torchrun, on CPUs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed_provider.training.plan import TrainingPlan

from training import tiny_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CELLS = [
    (method, stage, accumulation) for method in ("full", "lora") for stage in (0, 1, 2, 3) for accumulation in (1, 2)
]
SEEDED = ("lora", 0, 2)
# Models of other families, two steps of each.
FAMILY_CELLS: list[tuple[str, str, int]] = [
    *((family, "full", 2) for family in ("bloom", "gpt2", "gpt_neo", "qwen3")),
    *((family, "lora", 3) for family in ("bloom", "gpt2", "gpt_neo", "qwen3")),
    ("mamba", "lora", 0),
    ("openai-gpt", "lora", 0),
]
BROKEN = {
    "loss is no number": ({"model": "overflowing"}, "Lower optimization.learning_rate"),
    "two precisions": ({"ds_extra": {"bf16": {"enabled": True}}}, "bf16.enabled = True"),
    "another batch size": ({"ds_extra": {"train_batch_size": 64}}, "train_batch_size = 64"),
    "nothing to learn": ({"optimization": {"sequence_length": 1}}, "sequence_length = 1"),
    "no such layers": ({"lora_targets": ("no_such_layer",)}, "no_such_layer"),
}


def name_of(method: str, stage: int, accumulation: int) -> str:
    return f"{method}-zero{stage}-accumulation{accumulation}"


def settings_of(method: str, stage: int, accumulation: int) -> dict[str, Any]:
    return {
        "method": method,
        "stage": stage,
        "micro": 4 // accumulation,
        "accumulation": accumulation,
        "optimization": {"learning_rate": 5e-3 if method == "full" else 2e-2, "max_steps": 8, "eval_steps": 3},
    }


def losses(outcome: tiny_runs.Outcome) -> list[float]:
    metrics = outcome.read("result.json")["metrics"]
    return [metrics["first_train_loss"], metrics["train_loss"], metrics["eval_loss"]]


def assert_succeeded(outcome: tiny_runs.Outcome) -> dict[str, Any]:
    assert outcome.returncode == 0, outcome.text[-6000:]
    assert not any(name.startswith("failure") for name in outcome.files)
    result = outcome.read("result.json")
    assert outcome.returned[0] == result
    assert outcome.returned[1] == {"rank": 1, "token": result["token"]}
    return result


def earliest_failure(outcome: tiny_runs.Outcome) -> dict[str, Any]:
    assert outcome.returncode != 0
    assert "result.json" not in outcome.files
    failures = [json.loads(path.read_text()) for path in outcome.output.glob("failure-rank*.json")]
    return min(failures, key=lambda failure: failure["time"])


def overflowing_model(tiny_model: Path, folder: Path) -> Path:
    """The tiny model with one weight beyond all numbers, as a diverged training leaves it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.nn.init.constant_(model.model.norm.weight, float("inf"))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


SABOTAGED = {
    "rank 1 GPU out of memory": (1, "raise torch.OutOfMemoryError('CUDA out of memory')", "GPU_OOM"),
    "rank 0 exits": (0, "raise SystemExit(7)", "UNKNOWN"),
}
FAILS_AT_STEP_3 = """
import torch
from deepspeed_provider.training import causal_lm
real, calls = causal_lm._one_step, []
def one_step(*args):
    calls.append(1)
    if os.environ["RANK"] == "{rank}" and len(calls) == 3:
        {statement}
    return real(*args)
causal_lm._one_step = one_step
"""
LOADS_ANOTHER_MODEL = """
from deepspeed_provider.training import checkpoints
real = checkpoints.models.load_finished
def load(*args):
    model = real(*args)
    model.get_input_embeddings().weight.data.mul_(1.5)
    return model
checkpoints.models.load_finished = load
"""


@pytest.fixture(scope="module")
def outcomes(
    tiny_model: Path, tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tiny_runs.Outcome]:
    """All runs that can share ranks, by name; importing the libraries takes longer than any of them."""
    root = tmp_path_factory.mktemp("runs")
    plans: dict[str, TrainingPlan] = {}
    sabotage: dict[int, str] = {}
    models = {"tiny": tiny_model, "overflowing": overflowing_model(tiny_model, root / "overflowing")}
    models |= {family: tiny_runs.make_model_of(family, root / family) for family in tiny_runs.FAMILIES}

    def add(
        name: str, *, model: str = "tiny", lora_targets: tuple[str, ...] | None = None, code: str = "", **settings: Any
    ) -> None:
        plan = tiny_runs.plan(root / name.replace(" ", "-"), models[model], tiny_dataset, **settings)
        if lora_targets is not None:
            plan = dataclasses.replace(
                plan, method=dataclasses.replace(plan.method, name="lora", lora_targets=lora_targets)
            )
        sabotage[len(plans)] = code
        plans[name] = plan

    for method, stage, accumulation in CELLS:
        add(name_of(method, stage, accumulation), **settings_of(method, stage, accumulation))
    add("again", **settings_of(*SEEDED))
    another = settings_of(*SEEDED)
    add("another seed", **{**another, "optimization": {**another["optimization"], "seed": 2}})
    add(
        "bf16",
        method="lora",
        stage=3,
        precision="bf16",
        optimization={"max_steps": None, "epochs": 1.5, "gradient_checkpointing": True, "learning_rate": 2e-2},
    )
    for name, (settings, _) in BROKEN.items():
        add(name, **settings)
    for name, (rank, statement, _) in SABOTAGED.items():
        add(name, method="lora", stage=0, code=FAILS_AT_STEP_3.format(rank=rank, statement=statement))
    for family, method, stage in FAMILY_CELLS:
        learning_rate = 5e-3 if method == "full" else 2e-2
        optimization = {"learning_rate": learning_rate, "max_steps": 2, "gradient_checkpointing": stage == 0}
        add(f"{family}-{method}", model=family, method=method, stage=stage, optimization=optimization)
    add("another model", stage=0, optimization={"max_steps": 1}, code=LOADS_ANOTHER_MODEL)
    found = tiny_runs.torchrun_many(list(plans.values()), root / "scratch", sabotage=sabotage)
    return dict(zip(plans, found, strict=True))


@pytest.mark.parametrize(("method", "stage", "accumulation"), CELLS, ids=[name_of(*cell) for cell in CELLS])
def test_learns_and_saves_what_it_learnt(
    outcomes: dict[str, tiny_runs.Outcome], method: str, stage: int, accumulation: int
) -> None:
    outcome = outcomes[name_of(method, stage, accumulation)]
    result = assert_succeeded(outcome)
    first, _, held_out = losses(outcome)
    assert held_out < first - 1.5
    assert result["metrics"]["steps"] == 8
    assert result["metrics"]["tokens"] > 8 * 8 * 10
    assert result["metrics"]["peak_memory_bytes"] > 100_000_000
    assert abs(result["verification"]["trained_loss"] - result["verification"]["saved_loss"]) < 1e-4

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(outcome.output / "model")
    assert model.get_input_embeddings().num_embeddings == len(AutoTokenizer.from_pretrained(outcome.output / "model"))
    assert model.config.use_cache


@pytest.mark.parametrize(("method", "accumulation"), [(m, a) for m in ("full", "lora") for a in (1, 2)])
def test_all_stages_compute_the_same(outcomes: dict[str, tiny_runs.Outcome], method: str, accumulation: int) -> None:
    found = [losses(outcomes[name_of(method, stage, accumulation)]) for stage in (0, 1, 2, 3)]
    for stage in (1, 2, 3):
        assert found[stage] == pytest.approx(found[0], abs=1e-3), f"stage {stage}"


def test_progress_tells_each_phase_and_the_last_step(outcomes: dict[str, tiny_runs.Outcome]) -> None:
    outcome = outcomes[name_of("lora", 2, 1)]
    latest = outcome.read("progress.json")
    assert (latest["phase"], latest["step"], latest["total_steps"]) == ("done", 8, 8)
    assert latest["eval_loss"] == pytest.approx(outcome.read("result.json")["metrics"]["eval_loss"])
    history = [json.loads(line) for line in (outcome.output / "progress.jsonl").read_text().splitlines()]
    assert history[-1] == latest
    phases = [entry["phase"] for entry in history]
    assert list(dict.fromkeys(phases)) == ["loading", "training", "evaluating", "saving", "logging", "done"]
    assert phases.count("evaluating") == 3  # after steps 3 and 6, and at the end
    trained = [entry for entry in history if entry["step"] > 0]
    for name in ("loss", "learning_rate", "tokens_per_second", "peak_memory_bytes"):
        assert all(entry[name] > 0 for entry in trained), name


def test_the_same_seed_gives_the_same_run_and_another_seed_another(outcomes: dict[str, tiny_runs.Outcome]) -> None:
    first, again, other = (losses(outcomes[name]) for name in (name_of(*SEEDED), "again", "another seed"))
    assert first == again
    assert first != other


def test_bf16_with_gradient_checkpointing_at_stage_3_and_epochs(outcomes: dict[str, tiny_runs.Outcome]) -> None:
    outcome = outcomes["bf16"]
    result = assert_succeeded(outcome)
    assert result["metrics"]["steps"] == 9  # 48 rows, 8 a step, one and a half times
    assert result["metrics"]["eval_loss"] < result["metrics"]["first_train_loss"] - 1
    assert json.loads((outcome.output / "model/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(("family", "method"), [(family, method) for family, method, _ in FAMILY_CELLS])
def test_a_model_of_any_family_learns(outcomes: dict[str, tiny_runs.Outcome], family: str, method: str) -> None:
    outcome = outcomes[f"{family}-{method}"]
    result = assert_succeeded(outcome)
    first, _, held_out = losses(outcome)
    assert held_out < first - 0.1
    assert result["metrics"]["steps"] == 2
    assert result["verification"]["saved_loss"] == pytest.approx(result["verification"]["trained_loss"], abs=1e-4)
    assert json.loads((outcome.output / "model/config.json").read_text())["model_type"] == family
    # Each of two ranks says once what it does otherwise than planned.
    assert outcome.text.count("has no SDPA attention") == (2 if family in tiny_runs.WITHOUT_SDPA else 0)
    assert outcome.text.count("has no gradient checkpointing") == (2 if family == "openai-gpt" else 0)


@pytest.mark.parametrize("name", BROKEN)
def test_what_training_cannot_work_with_is_the_users_to_mend(outcomes: dict[str, tiny_runs.Outcome], name: str) -> None:
    failure = earliest_failure(outcomes[name])
    assert failure["kind"] == "USER", failure
    assert BROKEN[name][1] in failure["message"]


def test_optimizer_state_in_host_memory_without_a_compiler(
    tiny_model: Path, tiny_dataset: Path, tmp_path: Path
) -> None:
    """Nothing is compiled; where the plan asks for an optimizer that must be, torch's own does its work.

    With a compiler DeepSpeed would build its own first, which takes minutes of two cores.
    """
    extensions = tmp_path / "extensions"
    plan = tiny_runs.plan(
        tmp_path / "out",
        tiny_model,
        tiny_dataset,
        ds_extra={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    )
    env = {"CXX": "/nowhere/g++", "PATH": "/nowhere", "TORCH_EXTENSIONS_DIR": str(extensions)}
    outcome = tiny_runs.torchrun(plan.to_json(), tmp_path / "scratch", env=env)
    result = assert_succeeded(outcome)
    assert result["metrics"]["eval_loss"] < result["metrics"]["first_train_loss"] - 1
    assert "DeepSpeedCPUAdam cannot be built" in outcome.text
    assert not list(extensions.rglob("*.so"))


@pytest.mark.parametrize("name", SABOTAGED)
def test_a_rank_that_fails_in_the_middle_names_the_cause(outcomes: dict[str, tiny_runs.Outcome], name: str) -> None:
    rank, _, kind = SABOTAGED[name]
    outcome = outcomes[name]
    earliest = earliest_failure(outcome)
    assert (earliest["rank"], earliest["kind"], earliest["phase"], earliest["step"]) == (rank, kind, "training", 2)
    echoes = [path for path in outcome.output.glob("failure-rank*.json") if path.stem != f"failure-rank{rank}"]
    assert {json.loads(path.read_text())["kind"] for path in echoes} <= {"TRANSIENT"}


def test_a_saved_model_that_answers_differently_is_a_failure(outcomes: dict[str, tiny_runs.Outcome]) -> None:
    outcome = outcomes["another model"]
    assert outcome.returncode != 0
    failure = outcome.read("failure-rank0.json")
    assert (failure["type"], failure["phase"]) == ("SavedModelDiffers", "saving")
    assert "result.json" not in outcome.files
