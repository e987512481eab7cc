# SPDX-License-Identifier: Apache-2.0
"""What each rank leaves behind, in real processes that end before any heavy library is loaded."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from training import tiny_runs


def run_rank(
    wire: dict[str, Any], scratch: Path, *, rank: int = 0, world_size: int = 2, sabotage: str = "", **env: str
) -> tiny_runs.Outcome:
    """One rank alone, as torchrun starts it, up to the first thing that it does together with others."""
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "train.py").write_text(tiny_runs.RANK_SCRIPT.format(sabotage=sabotage))
    (scratch / "plan.json").write_text(json.dumps(wire))
    done = subprocess.run(
        [sys.executable, "train.py", "plan.json", "returned"],
        cwd=scratch,
        env={
            **os.environ,
            "PYTHONPATH": str(tiny_runs.PACKAGE_ROOT),
            "HF_HUB_OFFLINE": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    returned = scratch / f"returned{rank}"
    return tiny_runs.Outcome(
        returncode=done.returncode,
        text=done.stdout,
        output=Path(wire.get("output_uri", scratch)),
        returned={rank: json.loads(returned.read_text())} if returned.exists() else {},
    )


@pytest.fixture
def wire(tmp_path: Path) -> dict[str, Any]:
    """A plan whose model and data do not exist: it gets as far as resolving them."""
    return tiny_runs.plan(tmp_path / "out", tmp_path / "no-model", tmp_path / "no-data").to_json()


def changed(wire: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(wire))
    *parents, last = path.split(".")
    target = copy
    for name in parents:
        target = target[name]
    target[last] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "world_size", "words"),
    [
        pytest.param("version", 99, 2, ["version 99"], id="plan of another version"),
        pytest.param("optimisation", {}, 2, ["unknown keys", "optimisation"], id="unknown key"),
        pytest.param("model", {"revision": "x"}, 2, ["'ref'"], id="missing key"),
        pytest.param("model", None, 2, ["model must be an object"], id="null where settings belong"),
        pytest.param("world_size", 4, 2, ["world_size = 4", "2 ranks"], id="too few ranks"),
        pytest.param("token", "t", 1, ["world_size = 2", "1 ranks"], id="one rank of two"),
        pytest.param("job", "dance", 2, ["'dance'", "finetune", "evaluate"], id="unknown job"),
        pytest.param("token", "t", 2, ["no-model", "no such folder", "hub"], id="no such model folder"),
        pytest.param(
            "model.ref",
            "nobody/nothing-7b",
            2,
            ["nobody/nothing-7b", "not found on the hub", "SmolLM2-135M-Instruct"],
            id="no such hub id",
        ),
        pytest.param("job", "evaluate", 2, ["evaluation", "tuned_uri"], id="evaluation without settings"),
    ],
)
def test_a_request_that_cannot_run_leaves_one_clear_failure_file(
    wire: dict[str, Any], tmp_path: Path, path: str, value: Any, world_size: int, words: list[str]
) -> None:
    done = run_rank(changed(wire, path, value), tmp_path / "scratch", rank=1, world_size=world_size)
    assert done.returncode != 0
    failure = done.read("failure-rank1.json")
    assert failure["kind"] == "USER"
    assert failure["rank"] == 1
    for word in words:
        assert word in failure["message"]
    assert "result.json" not in done.files


def test_a_plan_without_an_output_folder_only_raises(tmp_path: Path) -> None:
    done = run_rank({"version": 1, "model": {}}, tmp_path / "scratch")
    assert done.returncode != 0
    assert "the training plan cannot be read" in done.text


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        pytest.param("SystemExit(3)", "UNKNOWN", id="SystemExit"),
        pytest.param("MemoryError()", "HOST_OOM", id="MemoryError"),
        pytest.param("KeyboardInterrupt()", "UNKNOWN", id="KeyboardInterrupt"),
        pytest.param("type('OutOfMemoryError', (RuntimeError,), {})('CUDA out of memory')", "GPU_OOM", id="GPU memory"),
        pytest.param("ModuleNotFoundError('No module named deepspeed')", "USER", id="missing library"),
        pytest.param("ConnectionResetError('peer')", "TRANSIENT", id="echo of another rank"),
    ],
)
def test_whatever_a_job_raises_is_in_the_failure_file(
    wire: dict[str, Any], tmp_path: Path, raised: str, kind: str
) -> None:
    sabotage = f"""
def job(plan, rank, reporter):
    reporter.update(phase="training", step=7, total_steps=9)
    raise {raised}
launcher.job_of = lambda plan: job
"""
    done = run_rank(wire, tmp_path / "scratch", sabotage=sabotage)
    assert done.returncode != 0
    failure = done.read("failure-rank0.json")
    assert (failure["kind"], failure["step"], failure["phase"]) == (kind, 7, "training")
    assert failure["peak_memory_bytes"] > 1_000_000
    assert "in job" in failure["traceback"]
    assert done.read("progress.json")["step"] in (0, 7)


COUNTED_JOB = """
def job(plan, rank, reporter):
    open("trained.log", "a").write("once\\n")
    {end}
launcher.job_of = lambda plan: job
launcher.leave_process_group = lambda: None
"""


def test_a_second_start_does_not_train_and_keeps_the_first_failure(wire: dict[str, Any], tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    sabotage = COUNTED_JOB.format(end="raise MemoryError('the cause')")
    first = run_rank(wire, scratch, sabotage=sabotage)
    failure = first.read("failure-rank0.json")
    second = run_rank(wire, scratch, sabotage=sabotage)
    assert second.returncode != 0
    assert "already started" in second.text
    assert (scratch / "trained.log").read_text() == "once\n"
    assert second.read("failure-rank0.json") == failure
    assert failure["message"] == "the cause"


def test_a_second_start_after_a_death_without_a_trace_says_so(wire: dict[str, Any], tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    sabotage = COUNTED_JOB.format(end="import os; os._exit(9)")
    run_rank(wire, scratch, sabotage=sabotage)
    second = run_rank(wire, scratch, sabotage=sabotage)
    assert (scratch / "trained.log").read_text() == "once\n"
    assert second.read("failure-rank0.json")["type"] == "AlreadyStarted"


def test_a_second_start_after_success_hands_back_the_result(wire: dict[str, Any], tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    sabotage = COUNTED_JOB.format(end="return {'metrics': {'loss': 1.5}}")
    first, second = (run_rank(wire, scratch, sabotage=sabotage) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert (scratch / "trained.log").read_text() == "once\n"
    assert first.returned[0] == second.returned[0] == second.read("result.json")
    assert first.returned[0]["metrics"] == {"loss": 1.5}
    assert not any(name.startswith("failure") for name in second.files)


def test_another_run_in_the_same_folder_is_refused(wire: dict[str, Any], tmp_path: Path) -> None:
    sabotage = COUNTED_JOB.format(end="return {}")
    run_rank(wire, tmp_path / "scratch", sabotage=sabotage)
    other = run_rank({**wire, "token": "another"}, tmp_path / "scratch", sabotage=sabotage)
    assert other.returncode != 0
    assert "output folder used twice" in other.text


def test_the_code_works_from_a_zip_with_the_standard_library_only(tmp_path: Path) -> None:
    archive = tmp_path / "code.zip"
    package = tiny_runs.PACKAGE_ROOT / "deepspeed_provider"
    with zipfile.ZipFile(archive, "w") as bundle:
        for path in [package / "__init__.py", *sorted((package / "training").glob("*.py"))]:
            bundle.write(path, path.relative_to(package.parent))
    script = """
import importlib, pkgutil, sys
import deepspeed_provider.training as training
for module in pkgutil.iter_modules(training.__path__):
    importlib.import_module(f"deepspeed_provider.training.{module.name}")
foreign = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(sorted(name for name in foreign if not name.startswith("_")), training.__file__)
"""
    # -I: neither this environment's site-packages of ours nor the checkout; -S leaves out site-packages.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(archive)!r})\n{script}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['deepspeed_provider'] "), done.stdout
    assert "code.zip" in done.stdout


def test_plan_round_trip(tmp_path: Path) -> None:
    from deepspeed_provider.training.plan import TrackingSettings, TrainingPlan

    plan = tiny_runs.plan(
        tmp_path, "m", tmp_path, tracking=TrackingSettings(tracking_uri="http://localhost", run_id="r")
    )
    assert TrainingPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    evaluation = tiny_runs.evaluation_of(plan, tmp_path)
    assert TrainingPlan.from_json(json.loads(json.dumps(evaluation.to_json()))) == evaluation
    assert dataclasses.is_dataclass(evaluation.evaluation)
