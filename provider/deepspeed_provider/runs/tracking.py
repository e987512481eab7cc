# SPDX-License-Identifier: Apache-2.0
"""One MLflow run per generation, made on the Airflow side before the training starts.

Tracking is an extra: whatever goes wrong here is a warning, and the training goes on without it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from deepspeed_provider.backends.base import RunIdentity
from deepspeed_provider.runs.record import Outcome

TOKEN_TAG = "deepspeed_provider.token"
STATUS = {
    Outcome.SUCCEEDED: "FINISHED",
    Outcome.FAILED: "FAILED",
    Outcome.CANCELLED: "KILLED",
    Outcome.OVERDUE: "KILLED",
}
PROBE_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTracker:
    """Tracks nothing."""

    def start(self, identity: RunIdentity) -> tuple[None, None]:  # noqa: ARG002
        return None, None

    def end(self, run_id: str, outcome: Outcome) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTracker:
    """Logs into a run that another task has opened and ended."""

    run_id: str
    url: str | None

    def start(self, identity: RunIdentity) -> tuple[str, str | None]:  # noqa: ARG002
        return self.run_id, self.url

    def end(self, run_id: str, outcome: Outcome) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowTracker:
    """Opens and ends MLflow runs. Credentials are MLflow's own environment variables.

    Attributes:
        tags: on each run; for people, and to find the Airflow task again.
    """

    tracking_uri: str
    experiment: str
    run_name: str
    tags: Mapping[str, str] = field(default_factory=dict)
    log: logging.Logger = field(default_factory=lambda: logging.getLogger(__name__))

    def start(self, identity: RunIdentity) -> tuple[str | None, str | None]:
        """The MLflow run of this identity, made if there is none."""
        try:
            require_answer(self.tracking_uri)
            return self._find_or_create(identity)
        except Exception as error:  # noqa: BLE001  (any failure of tracking must leave the training alone)
            self.log.warning("Training goes on without MLflow: %s: %s", type(error).__name__, error)
            return None, None

    def end(self, run_id: str, outcome: Outcome) -> None:
        end_run(self.tracking_uri, run_id, outcome, log=self.log)

    def _find_or_create(self, identity: RunIdentity) -> tuple[str, str | None]:
        client = mlflow_client(self.tracking_uri)
        experiment_id = self._experiment_id(client)
        # Whoever died between making the run and noting its id must not leave a second one.
        found = client.search_runs([experiment_id], filter_string=f"tags.`{TOKEN_TAG}` = '{identity.token}'")
        if found:
            run_id = found[0].info.run_id
        else:
            tags = {**self.tags, TOKEN_TAG: identity.token, "generation": str(identity.generation)}
            run_id = client.create_run(experiment_id, run_name=self.run_name, tags=tags).info.run_id
        return run_id, run_url(self.tracking_uri, experiment_id, run_id)

    def _experiment_id(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            try:
                return str(client.create_experiment(self.experiment))
            except MlflowException:
                # Somebody made it between the two calls.
                experiment = client.get_experiment_by_name(self.experiment)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)


def without_telemetry(environment: MutableMapping[str, str]) -> None:
    """Leaves out MLflow's usage statistics, unless somebody wants them.

    Where they cannot be sent, their thread takes a variable out of the environment again, and a request that is reading
    the environment just then fails (MLflow 3.17).
    """
    environment.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


def end_run(
    tracking_uri: str, run_id: str, outcome: Outcome, *, log: logging.Logger | Any, unless_ended: bool = False
) -> None:
    """Marks an MLflow run as ended. Never raises.

    Args:
        unless_ended: leaves a run alone that somebody has ended already.
    """
    try:
        require_answer(tracking_uri)
        client = mlflow_client(tracking_uri)
        if unless_ended and client.get_run(run_id).info.status not in ("RUNNING", "SCHEDULED"):
            return
        client.set_terminated(run_id, status=STATUS[outcome])
    except Exception as error:  # noqa: BLE001  (any failure of tracking must leave the run alone)
        log.warning("MLflow run %s could not be marked %s: %s", run_id, STATUS[outcome], error)


def mlflow_client(tracking_uri: str) -> Any:
    """MLflow's client; the registry is the tracking server's own."""
    without_telemetry(os.environ)
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri)


def run_url(tracking_uri: str, experiment_id: str, run_id: str) -> str | None:
    """Address of the run's page, where the tracking server has pages."""
    if not tracking_uri.startswith(("http://", "https://")):
        return None
    return f"{tracking_uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"


def without_credentials(tracking_uri: str) -> str:
    """``tracking_uri``, which travels to the cluster and is shown in links.

    Raises:
        ValueError: it holds a password; the text does not.
    """
    if urlsplit(tracking_uri).password is not None:
        raise ValueError(
            "The MLflow tracking URI holds a password, which would travel with the run and be shown in links. Take it "
            "out; MLflow reads MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD from the environment."
        )
    return tracking_uri


def require_answer(tracking_uri: str) -> None:
    """Raises OSError when a tracking server does not listen.

    MLflow's own client retries for minutes before it says so, while a GPU is waiting.
    """
    parts = urlsplit(tracking_uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")):
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.create_connection((parts.hostname, port), timeout=PROBE_TIMEOUT_SECONDS):
        return
