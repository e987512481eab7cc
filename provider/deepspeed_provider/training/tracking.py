# SPDX-License-Identifier: Apache-2.0
"""MLflow from rank 0, into a run that the operator made. Nothing here can stop or slow training for long."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from . import models, storage
from .plan import TrackingSettings, TrainingPlan

log = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0
# A server that does not answer is asked again after so long, then after twice as long, and so on.
FIRST_PAUSE_SECONDS = 30.0
METRICS_PER_BATCH = 1000  # limit of MLflow's log-batch endpoint
PARAM_VALUE_CHARACTERS = 6000  # limit of MLflow's log-batch endpoint
# Without usage statistics: where they cannot be sent, their thread changes the environment while requests read it.
DURING_TRAINING = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
FOR_UPLOADS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "120", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}


class Tracker:
    """Sends parameters, metrics, texts and the model to one MLflow run.

    Metrics are kept until the server takes them, so that a short outage loses none.

    Args:
        settings: where to; None (ranks other than 0, or no tracking asked for) makes every call do nothing.
        clock: seconds, for the rhythm of sending.
    """

    def __init__(self, settings: TrackingSettings | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._client: Any = None
        self._waiting: list[Any] = []
        self._params: dict[str, str] = {}
        self._next_send_s = float("-inf")
        self._pause_s = FIRST_PAUSE_SECONDS
        self._warned = False

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Parameters of the run, sent once with the next batch."""
        self._params.update({name: str(value)[:PARAM_VALUE_CHARACTERS] for name, value in params.items()})
        self._send_when_due()

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Metrics of one step, sent in batches about every two seconds."""
        if self._settings is None:
            return
        time_ms = int(time.time() * 1000)
        self._waiting += [(name, float(value), time_ms, step) for name, value in metrics.items()]
        self._send_when_due()

    def log_texts(self, texts: Mapping[str, str]) -> None:
        """Text artifacts by their path in the run."""
        for name, text in texts.items():
            self._attempt(partial(_log_text, name, text))

    def log_model(self, plan: TrainingPlan, *, base: Path, example_prompt: str) -> str | None:
        """The saved model as an MLflow model of the run; None when it was not logged.

        Returns its ``models:/`` URI, or ``runs:/`` where the cluster has an MLflow before 3.
        """
        self.close()
        if self._waiting:
            return None  # the server takes not even the metrics

        def send(client: Any, run_id: str) -> str:
            os.environ.update(FOR_UPLOADS)
            import mlflow

            # A logged model belongs to the experiment that is set, else to the default one, not to its run's.
            mlflow.set_experiment(experiment_id=client.get_run(run_id).info.experiment_id)
            return _log_transformers_model(plan, run_id, base=base, example_prompt=example_prompt)

        uri = self._attempt(send)
        return None if uri is None else str(uri)

    def close(self) -> None:
        """Send what is left, also while pausing."""
        if self._settings is not None and (self._waiting or self._params):
            self._send()

    def _send_when_due(self) -> None:
        if self._settings is not None and self._clock() >= self._next_send_s:
            self._send()

    def _send(self) -> None:
        while self._waiting or self._params:
            batch, params = self._waiting[:METRICS_PER_BATCH], dict(self._params)

            def send(client: Any, run_id: str, batch: Any = batch, params: Any = params) -> bool:
                from mlflow.entities import Metric, Param

                client.log_batch(
                    run_id,
                    metrics=[Metric(*entry) for entry in batch],
                    params=[Param(name, value) for name, value in params.items()],
                )
                return True

            if self._attempt(send) is None:
                self._next_send_s = self._clock() + self._pause_s
                self._pause_s *= 2
                return
            self._waiting, self._params = self._waiting[len(batch) :], {}
        self._next_send_s, self._pause_s = self._clock() + FLUSH_SECONDS, FIRST_PAUSE_SECONDS

    def _attempt(self, action: Callable[[Any, str], Any]) -> Any:
        """What ``action`` returns, or None after any failure; the first failure is logged."""
        if self._settings is None:
            return None
        try:
            return action(self._connected(), self._settings.run_id)
        except Exception as error:  # noqa: BLE001  (whatever MLflow raises, training goes on)
            if not self._warned:
                log.warning(
                    "MLflow at %s does not take this run's data; training goes on without: %s: %s",
                    self._settings.tracking_uri,
                    type(error).__name__,
                    error,
                )
            self._warned = True
            return None

    def _connected(self) -> Any:
        if self._client is None and self._settings is not None:
            os.environ.update(DURING_TRAINING)
            import mlflow

            mlflow.set_tracking_uri(self._settings.tracking_uri)
            self._client = mlflow.MlflowClient(tracking_uri=self._settings.tracking_uri)
        return self._client


def _log_text(name: str, text: str, client: Any, run_id: str) -> bool:
    client.log_text(run_id, text, name)
    return True


def _log_transformers_model(plan: TrainingPlan, run_id: str, *, base: Path, example_prompt: str) -> str:
    """Log the folder ``output_uri/model`` without starting or ending the run."""
    import tempfile
    from inspect import signature

    import mlflow.transformers
    from mlflow.models import Model, infer_signature

    # Before MLflow 3 a model has a path in its run and no name; a name given anyway is ignored without a word.
    named = "name" in signature(Model.log).parameters
    place: dict[str, Any] = {"artifact_path": None, "name": "model"} if named else {"artifact_path": "model"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = storage.local_folder(storage.join(plan.output_uri, "model"), Path(scratch))
        # MLflow could copy the folder without loading it, but its 3.17 does not understand the task
        # table of transformers 5.24 there; so the model is in memory once more, on the CPU.
        components = {
            "model": models.load_finished(folder, plan.model, plan.cache_uri),
            "tokenizer": models.load_tokenizer(folder),
        }
        if models.is_adapter(folder):
            if "base_model_path" in signature(mlflow.transformers.save_model).parameters:
                place["base_model_path"] = str(base)
            else:
                # Such a release stores a local base together with the adapter's layers, and reads back random weights.
                components["model"] = components["model"].merge_and_unload()
        # Model.log takes a run id; the flavor's own log_model would start and end the run.
        info = Model.log(
            flavor=mlflow.transformers,
            run_id=run_id,
            transformers_model=components,
            task="text-generation",
            signature=infer_signature([example_prompt], ["text"]),
            input_example=[example_prompt],
            pip_requirements=_requirements(),
            # It would generate hundreds of tokens; what was saved has been verified already.
            validate_serving_input=False,
            **place,
        )
    return str(info.model_uri)


def _requirements() -> list[str]:
    """What the model needs to be served, as installed here."""
    from importlib import metadata

    found = []
    for package in ("transformers", "torch", "peft", "accelerate"):
        try:
            found.append(f"{package}=={metadata.version(package).partition('+')[0]}")
        except metadata.PackageNotFoundError:
            continue
    return found
