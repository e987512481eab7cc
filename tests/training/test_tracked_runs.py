# SPDX-License-Identifier: Apache-2.0
"""Fine-tune and evaluation with a real MLflow server beside them, and with one that is dead."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deepspeed_provider.training.plan import TrackingSettings, TrainingPlan

from training import tiny_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mlflow")
    port = tiny_runs.free_port()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                *[sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)],
                *["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"],
                *["--artifacts-destination", str(folder / "artifacts")],
            ],
            cwd=folder,
            # MLflow's job runner would add eight processes.
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    uri = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"{uri}/health", timeout=2).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.5)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


MERGED = {"merged": (True, 2), "adapter-zero3": (False, 3)}
DEAD = ("refuses", "never answers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """What became of all runs, and the MLflow runs that some of them wrote to."""

    outcomes: dict[str, tiny_runs.Outcome]
    tracking: dict[str, TrackingSettings]

    def result(self, name: str) -> dict[str, Any]:
        outcome = self.outcomes[name]
        assert outcome.returncode == 0, outcome.text[-6000:]
        result: dict[str, Any] = outcome.read("result.json")
        return result


@pytest.fixture(scope="module")
def runs(server: str, tiny_model: Path, tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All runs in ranks that import torch and MLflow once."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=server)
    experiment_id = client.create_experiment("fine-tunes")
    root = tmp_path_factory.mktemp("runs")
    plans: dict[str, TrainingPlan] = {}
    tracking: dict[str, TrackingSettings] = {}
    for name, (merge_adapter, stage) in MERGED.items():
        run = client.create_run(experiment_id)
        tracking[name] = TrackingSettings(tracking_uri=server, run_id=run.info.run_id)
        plans[name] = tiny_runs.plan(
            root / name,
            tiny_model,
            tiny_dataset,
            method="lora",
            stage=stage,
            tracking=tracking[name],
            merge_adapter=merge_adapter,
            optimization={"learning_rate": 2e-2, "max_steps": 10},
        )
        plans[f"{name} evaluated"] = tiny_runs.evaluation_of(plans[name], root / f"{name}-evaluated", generations=3)
    plans["untracked"] = tiny_runs.plan(root / "untracked", tiny_model, tiny_dataset, method="lora")
    with socket.socket() as refusing, socket.socket() as silent:
        for dead in (refusing, silent):
            dead.bind(("127.0.0.1", 0))
        silent.listen(16)
        for name, dead in zip(DEAD, (refusing, silent), strict=True):
            nowhere = TrackingSettings(tracking_uri=f"http://127.0.0.1:{dead.getsockname()[1]}", run_id="0" * 32)
            output = root / name.replace(" ", "-")
            plans[name] = tiny_runs.plan(output, tiny_model, tiny_dataset, method="lora", tracking=nowhere)
        found = tiny_runs.torchrun_many(
            list(plans.values()), root / "scratch", also_import=("mlflow", "mlflow.transformers")
        )
    return Runs(outcomes=dict(zip(plans, found, strict=True)), tracking=tracking)


@pytest.mark.parametrize("name", MERGED)
def test_run_model_and_evaluation_in_one_mlflow_run(runs: Runs, tmp_path: Path, name: str) -> None:
    import mlflow

    settings, (merge_adapter, stage) = runs.tracking[name], MERGED[name]
    client = mlflow.MlflowClient(tracking_uri=settings.tracking_uri)
    tuned, evaluated = runs.result(name), runs.result(f"{name} evaluated")
    assert tuned["adapter"] is not merge_adapter

    found = client.get_run(settings.run_id)
    assert found.info.status == "RUNNING"
    assert found.data.params["method.lora_rank"] == "8"
    assert found.data.params["zero_stage"] == str(stage)
    assert len(client.get_metric_history(settings.run_id, "loss")) == 10
    metrics = evaluated["metrics"]
    assert found.data.metrics["perplexity_ratio"] == pytest.approx(metrics["perplexity_ratio"])
    assert metrics["perplexity_ratio"] < 0.5
    # The same model by two ways: trained engine, and loaded from disk without DeepSpeed.
    assert metrics["tuned_loss"] == pytest.approx(tuned["metrics"]["eval_loss"], abs=1e-4)

    samples = evaluated["samples"]
    assert len(samples) == 3
    assert samples[0]["reference"] == "It is 49."
    text = Path(
        mlflow.artifacts.download_artifacts(
            run_id=settings.run_id,
            artifact_path="evaluation/generations.json",
            tracking_uri=settings.tracking_uri,
            dst_path=str(tmp_path),
        )
    ).read_text()
    assert json.loads(text) == samples

    mlflow.set_tracking_uri(settings.tracking_uri)
    model_id = tuned["mlflow_model_uri"].removeprefix("models:/")
    logged = client.get_logged_model(model_id)
    assert (logged.source_run_id, logged.experiment_id) == (settings.run_id, found.info.experiment_id)
    described = mlflow.models.get_model_info(tuned["mlflow_model_uri"])
    assert described.signature is not None
    assert described.saved_input_example_info is not None
    served = mlflow.pyfunc.load_model(tuned["mlflow_model_uri"], model_config={"max_new_tokens": 4})
    assert isinstance(served.predict(["What is 48 plus one?"])[0], str)


@pytest.mark.parametrize("name", DEAD)
def test_a_dead_server_changes_nothing_but_a_warning(runs: Runs, name: str) -> None:
    tracked, untracked = runs.result(name), runs.result("untracked")
    assert tracked["mlflow_model_uri"] is None
    assert runs.outcomes[name].text.count("training goes on without") == 1
    for metric in ("train_loss", "eval_loss", "first_train_loss"):
        assert tracked["metrics"][metric] == untracked["metrics"][metric]
    # A few requests of five seconds each.
    assert runs.outcomes[name].seconds < runs.outcomes["untracked"].seconds + 45
