# SPDX-License-Identifier: Apache-2.0
"""Fine-tune and evaluation with a real MLflow server beside them, and with one that is dead."""

from __future__ import annotations

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

pytestmark = pytest.mark.slow


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


@pytest.fixture
def tracked(server: str) -> tuple[Any, TrackingSettings]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name("fine-tunes")
    experiment_id = client.create_experiment("fine-tunes") if experiment is None else experiment.experiment_id
    run = client.create_run(experiment_id)
    return client, TrackingSettings(tracking_uri=server, run_id=run.info.run_id)


def run(plan: TrainingPlan, scratch: Path, **env: str) -> dict[str, Any]:
    outcome = tiny_runs.torchrun(plan.to_json(), scratch, env=env)
    assert outcome.returncode == 0, outcome.text[-6000:]
    result: dict[str, Any] = outcome.read("result.json")
    result["log"] = outcome.text
    return result


@pytest.mark.parametrize(
    ("merge_adapter", "stage"), [pytest.param(True, 2, id="merged"), pytest.param(False, 3, id="adapter-zero3")]
)
def test_run_model_and_evaluation_in_one_mlflow_run(
    tiny_model: Path,
    tiny_dataset: Path,
    tmp_path: Path,
    tracked: tuple[Any, TrackingSettings],
    merge_adapter: bool,
    stage: int,
) -> None:
    import mlflow

    client, settings = tracked
    plan = tiny_runs.plan(
        tmp_path / "out",
        tiny_model,
        tiny_dataset,
        method="lora",
        stage=stage,
        tracking=settings,
        merge_adapter=merge_adapter,
        optimization={"learning_rate": 2e-2, "max_steps": 10},
    )
    tuned = run(plan, tmp_path / "scratch")
    assert tuned["adapter"] is not merge_adapter
    evaluated = run(tiny_runs.evaluation_of(plan, tmp_path / "evaluation", generations=3), tmp_path / "scratch")

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


@pytest.fixture(scope="module")
def untracked(
    tiny_model: Path, tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], float]:
    """The same run without tracking, and the seconds it took."""
    folder = tmp_path_factory.mktemp("untracked")
    started_s = time.monotonic()
    plan = tiny_runs.plan(folder / "out", tiny_model, tiny_dataset, method="lora")
    return run(plan, folder / "scratch"), time.monotonic() - started_s


@pytest.mark.parametrize("kind", ["refuses", "never answers"])
def test_a_dead_server_changes_nothing_but_a_warning(
    tiny_model: Path, tiny_dataset: Path, tmp_path: Path, untracked: tuple[dict[str, Any], float], kind: str
) -> None:
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        if kind == "never answers":
            dead.listen(16)
        settings = TrackingSettings(tracking_uri=f"http://127.0.0.1:{dead.getsockname()[1]}", run_id="0" * 32)
        started_s = time.monotonic()
        plan = tiny_runs.plan(tmp_path / "out", tiny_model, tiny_dataset, method="lora", tracking=settings)
        tracked = run(plan, tmp_path / "scratch")
        seconds = time.monotonic() - started_s
    assert tracked["mlflow_model_uri"] is None
    assert tracked["log"].count("training goes on without") == 1
    for name in ("train_loss", "eval_loss", "first_train_loss"):
        assert tracked["metrics"][name] == untracked[0]["metrics"][name]
    # Importing MLflow, and a few requests of five seconds each.
    assert seconds < untracked[1] + 45
