# SPDX-License-Identifier: Apache-2.0
"""Real two-rank runs with the libraries of the runtimes that users have, which have no peft."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bare_environment import make_bare_environment
from deepspeed_provider.training.plan import TrackingSettings, TrainingPlan

from training import tiny_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VERSIONS = Path(__file__).with_name("older-stack.txt")
PREINSTALLED = ("accelerate", "deepspeed", "huggingface-hub", "mlflow-skinny", "tokenizers", "transformers")
STAGES = (0, 1, 2, 3)
# Without SDPA.
FAMILIES = ("bloom", "gpt_neo")
REFUSED = {
    "lora without peft": "Add it to the libraries of the run (peft==0.15.2",
    "a newer tokenizer": "no tokenizer that transformers 4.",
    "newer positions": "Install transformers>=5 on the cluster",
}
# Made by the older libraries themselves: they cannot read all that the newer ones write.
MAKES_MODEL_AND_RUN = """
import sys
from pathlib import Path
import mlflow
from training import tiny_runs
tiny_runs.make_model(Path(sys.argv[1]))
for family in sys.argv[3:]:
    tiny_runs.make_model_of(family, Path(sys.argv[1]).with_name(family))
print(mlflow.MlflowClient(tracking_uri=sys.argv[2]).create_run("0").info.run_id)
"""
READS_LOGGED_MODEL = """
import sys
from pathlib import Path
import mlflow
from deepspeed_provider.training import models
from deepspeed_provider.training.plan import ModelSettings
mlflow.set_tracking_uri(sys.argv[1])
logged = mlflow.transformers.load_model(sys.argv[2], return_type="components")
saved = models.load_finished(Path(sys.argv[3]), ModelSettings(ref="unused"), sys.argv[3])
batch = logged["tokenizer"]("What is 48 plus one?", return_tensors="pt")["input_ids"]
for model in (logged["model"], saved):
    print(float(model(input_ids=batch, labels=batch).loss))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """An interpreter, and folders of packages that come before its own."""

    python: Path
    packages: tuple[Path, ...]

    def printed(self, code: str, *arguments: object) -> list[str]:
        """Runs ``code`` and returns the words that it prints."""
        path = tiny_runs.search_path(*self.packages, Path(__file__).parents[1])
        done = subprocess.run(
            [self.python, "-c", code, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.split()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """The older libraries above the current ones, and no peft."""
    root = tmp_path_factory.mktemp("older")
    python = make_bare_environment(root / "venv", without=("mlflow", "peft"))
    return Stack(python=python, packages=(installed(root / "runtime", *PREINSTALLED),))


@pytest.fixture(scope="module")
def with_peft(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """The same with the library that a job with LoRA asks for."""
    folder = installed(tmp_path_factory.mktemp("peft"), "peft")
    return dataclasses.replace(stack, packages=(*stack.packages, folder))


def installed(folder: Path, *names: str) -> Path:
    """In a folder of their own: the environment is links to this one, which must stay as it is."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, "--constraint", str(VERSIONS), *names], check=True, timeout=240)
    return folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """What became of all runs, by name, and where their models were logged."""

    outcomes: dict[str, tiny_runs.Outcome]
    tracking_uri: str

    def result(self, name: str) -> dict[str, Any]:
        outcome = self.outcomes[name]
        assert outcome.returncode == 0, outcome.text[-6000:]
        found: dict[str, Any] = outcome.read("result.json")
        return found


@pytest.fixture(scope="module")
def runs(
    stack: Stack, with_peft: Stack, tiny_model: Path, tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    """All runs, in two groups of ranks that import the libraries once: without peft and with it."""
    root = tmp_path_factory.mktemp("runs")
    tracking_uri, model = (root / "mlflow").as_uri(), root / "model"
    run_id = with_peft.printed(MAKES_MODEL_AND_RUN, model, tracking_uri, *FAMILIES)[-1]

    def plan(name: str, *, of: Path = model, **settings: Any) -> TrainingPlan:
        return tiny_runs.plan(root / name.replace(" ", "-"), of, tiny_dataset, **settings)

    def at_all_stages(method: str, **optimization: Any) -> dict[str, TrainingPlan]:
        settings = {"method": method, "micro": 2, "accumulation": 2, "optimization": {"max_steps": 8, **optimization}}
        names = {stage: f"{method}-zero{stage}" for stage in STAGES}
        return {name: plan(name, stage=stage, **settings) for stage, name in names.items()}

    without = at_all_stages("full", eval_steps=4)
    without["bf16"] = plan("bf16", stage=3, precision="bf16", optimization={"gradient_checkpointing": True})
    without["full-zero3 evaluated"] = tiny_runs.evaluation_of(without["full-zero3"], root / "full-evaluated")
    without["lora without peft"] = plan("lora without peft", method="lora")
    without["a newer tokenizer"] = plan("a newer tokenizer", of=tiny_model)
    without["newer positions"] = plan("newer positions", of=with_newer_positions(model, root / "newer"))
    having = at_all_stages("lora", learning_rate=2e-2)
    having["adapter"] = plan(
        "adapter",
        method="lora",
        stage=3,
        merge_adapter=False,
        tracking=TrackingSettings(tracking_uri=tracking_uri, run_id=run_id),
        optimization={"learning_rate": 2e-2, "max_steps": 8},
    )
    for family in FAMILIES:
        for method, stage, learning_rate, plans in (("full", 2, 5e-3, without), ("lora", 3, 2e-2, having)):
            two_steps = {"learning_rate": learning_rate, "max_steps": 2}
            name = f"{family}-{method}"
            plans[name] = plan(name, of=root / family, method=method, stage=stage, optimization=two_steps)
    having["adapter evaluated"] = tiny_runs.evaluation_of(having["adapter"], root / "adapter-evaluated")
    outcomes: dict[str, tiny_runs.Outcome] = {}
    for used, plans in ((stack, without), (with_peft, having)):
        found = tiny_runs.torchrun_many(
            list(plans.values()), root / f"scratch{len(outcomes)}", python=used.python, packages=used.packages
        )
        outcomes.update(zip(plans, found, strict=True))
    return Runs(outcomes=outcomes, tracking_uri=tracking_uri)


def with_newer_positions(model: Path, folder: Path) -> Path:
    """``model`` with a config.json as transformers 5 writes it."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_these_are_older_libraries(stack: Stack) -> None:
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    pinned = dict(line.split("==") for line in VERSIONS.read_text().splitlines() if "==" in line)
    assert stack.printed(code, *PREINSTALLED) == [pinned[name] for name in PREINSTALLED]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_all_stages_learn_the_same_and_save_it(runs: Runs, method: str) -> None:
    found = [runs.result(f"{method}-zero{stage}") for stage in STAGES]
    for result in found:
        metrics, verification = result["metrics"], result["verification"]
        assert metrics["eval_loss"] < metrics["first_train_loss"] - 1.5
        assert metrics["eval_loss"] == pytest.approx(found[0]["metrics"]["eval_loss"], abs=1e-3)
        assert verification["saved_loss"] == pytest.approx(verification["trained_loss"], abs=1e-4)


def test_bf16_with_gradient_checkpointing_at_stage_3(runs: Runs) -> None:
    metrics = runs.result("bf16")["metrics"]
    assert metrics["eval_loss"] < metrics["first_train_loss"] - 1


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_sdpa_learns(runs: Runs, family: str, method: str) -> None:
    metrics = runs.result(f"{family}-{method}")["metrics"]
    assert metrics["eval_loss"] < metrics["first_train_loss"] - 0.1
    assert runs.outcomes[f"{family}-{method}"].text.count("has no SDPA attention") == 2


@pytest.mark.parametrize("name", ["full-zero3", "adapter"])
def test_what_was_saved_is_read_back_and_evaluated(runs: Runs, name: str) -> None:
    tuned, metrics = runs.result(name), runs.result(f"{name} evaluated")["metrics"]
    assert tuned["adapter"] is (name == "adapter")
    assert metrics["tuned_loss"] == pytest.approx(tuned["metrics"]["eval_loss"], abs=1e-4)
    assert metrics["perplexity_ratio"] < 0.5


def test_an_adapter_is_logged_to_mlflow_as_a_model_that_answers_the_same(runs: Runs, with_peft: Stack) -> None:
    uri = runs.result("adapter")["mlflow_model_uri"]
    assert uri is not None, runs.outcomes["adapter"].text[-6000:]
    assert uri.startswith("runs:/")
    folder = runs.outcomes["adapter"].output / "model"
    logged, saved = with_peft.printed(READS_LOGGED_MODEL, runs.tracking_uri, uri, folder)
    assert float(logged) == pytest.approx(float(saved), abs=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_these_libraries_cannot_do_is_the_users_to_mend(runs: Runs, name: str) -> None:
    outcome = runs.outcomes[name]
    assert outcome.returncode != 0
    failure = outcome.read("failure-rank0.json")
    assert failure["kind"] == "USER", failure
    assert REFUSED[name] in failure["message"]
