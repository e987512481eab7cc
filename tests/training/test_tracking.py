# SPDX-License-Identifier: Apache-2.0
"""Against a real MLflow store and real sockets that do not answer as MLflow does."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deepspeed_provider.training.plan import TrackingSettings
from deepspeed_provider.training.tracking import METRICS_PER_BATCH, Tracker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _keep_mlflow_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "5")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    import mlflow

    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder}/mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=uri)
    client.create_experiment("fine-tunes", artifact_location=str(folder / "artifacts"))
    return client, uri


@pytest.fixture
def run(store: tuple[Any, str]) -> tuple[Any, TrackingSettings]:
    client, uri = store
    experiment = client.get_experiment_by_name("fine-tunes")
    return client, TrackingSettings(tracking_uri=uri, run_id=client.create_run(experiment.experiment_id).info.run_id)


def test_everything_arrives_and_the_run_is_left_running(run: tuple[Any, TrackingSettings]) -> None:
    client, settings = run
    clock = Clock()
    tracker = Tracker(settings, clock=clock)
    tracker.log_params({"method.name": "lora", "long": "x" * 9000})
    for step in range(1, 2 * METRICS_PER_BATCH + 1):
        tracker.log_metrics({"loss": 1 / step}, step=step)
    assert client.get_run(settings.run_id).data.metrics == {}
    clock.now += 5
    tracker.log_metrics({"loss": 0.25}, step=2 * METRICS_PER_BATCH + 1)
    tracker.log_texts({"evaluation/x.md": "# hello"})
    tracker.close()
    found = client.get_run(settings.run_id)
    assert found.info.status == "RUNNING"
    assert found.data.params["method.name"] == "lora"
    assert len(client.get_metric_history(settings.run_id, "loss")) == 2 * METRICS_PER_BATCH + 1
    assert [file.path for file in client.list_artifacts(settings.run_id, "evaluation")] == ["evaluation/x.md"]


def test_without_settings_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker(None)
    tracker.log_params({"a": 1})
    tracker.log_metrics({"a": 1}, step=1)
    tracker.log_texts({"a": "b"})
    tracker.close()
    assert tracker.log_model(None, base=Path(), example_prompt="") is None  # type: ignore[arg-type]
    assert caplog.records == []


class Overloaded(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.requests.append(self.path)  # type: ignore[attr-defined]
        self.send_response(503)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def overloaded() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Overloaded)
    server.requests = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_failing_server_is_asked_ever_more_rarely_with_one_warning(
    overloaded: ThreadingHTTPServer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    tracker = Tracker(
        TrackingSettings(tracking_uri=f"http://127.0.0.1:{overloaded.server_port}", run_id="r"), clock=clock
    )
    started_s = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="deepspeed_provider.training.tracking"):
        for step in range(600):
            clock.now += 1.0
            tracker.log_metrics({"loss": 1.0}, step=step)
    assert time.monotonic() - started_s < 10
    # At 0, 30, 90, 210 and 450 seconds.
    assert len(overloaded.requests) == 5  # type: ignore[attr-defined]
    ours = [record for record in caplog.records if record.name == "deepspeed_provider.training.tracking"]
    assert len(ours) == 1
    assert "training goes on" in ours[0].message


def test_metrics_of_an_outage_arrive_afterwards(run: tuple[Any, TrackingSettings]) -> None:
    client, settings = run
    clock = Clock()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        tracker = Tracker(TrackingSettings(tracking_uri=dead, run_id=settings.run_id), clock=clock)
        tracker.log_metrics({"loss": 3.0}, step=1)
    # The server is back: the same tracker, now with a store that answers.
    tracker._client = client
    tracker.log_metrics({"loss": 2.0}, step=2)
    tracker.close()
    assert [metric.value for metric in client.get_metric_history(settings.run_id, "loss")] == [3.0, 2.0]
