# SPDX-License-Identifier: Apache-2.0
"""The services beside the engine on a laptop: an MLflow server and a standalone Airflow."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from deepspeed_provider.errors import EngineError
from deepspeed_provider.local.airflow_api import unhealthy_components
from deepspeed_provider.local.engine import HOME_VARIABLE
from deepspeed_provider.local.processes import (
    ProcessRecord,
    free_port,
    last_line,
    require_free,
    search_path,
    start_group,
    stop_recorded,
    write_atomically,
)


@dataclass(slots=True, kw_only=True)
class Service:
    """A command of ours that answers HTTP when it is ready.

    What one object started, only that object stops; what a killed session left is stopped by its record.

    Attributes:
        folder: its state; holds ``<name>.log`` and ``<name>.json``, the record of its process.
        health_path: answers 200 when the service can be used, with ``healthy(body)`` true.
    """

    name: str
    command: tuple[str, ...]
    port: int
    folder: Path
    environment: Mapping[str, str]
    health_path: str
    healthy: Callable[[str], bool] = lambda _: True
    start_timeout_seconds: float = 180.0
    _started: ProcessRecord | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def _record_path(self) -> Path:
        return self.folder / f"{self.name}.json"

    def start(self) -> None:
        """Ends a leftover of an earlier start, then starts; ``wait`` tells when it can be used."""
        self.stop_leftover()
        require_free(self.port, self.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        _, self._started = start_group(
            self.command, environment=self.environment, folder=self.folder, log_path=self.log_path
        )
        write_atomically(self._record_path, json.dumps(asdict(self._started)))

    def running(self) -> ProcessRecord | None:
        """The live process that this object started, else the one on record in its folder."""
        record = self._started or self._recorded()
        return record if record is not None and record.alive else None

    def _recorded(self) -> ProcessRecord | None:
        try:
            return ProcessRecord(**json.loads(self._record_path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def stop(self, grace_seconds: float = 20.0) -> None:
        """Ends what this object started, and everything below it. Another's service is left alone."""
        if self._started is None:
            return
        stop_recorded(self._started, grace_seconds)
        if self._recorded() == self._started:
            self._record_path.unlink(missing_ok=True)
        self._started = None

    def stop_leftover(self, grace_seconds: float = 20.0) -> None:
        """Ends the service on record in this folder, whoever started it: for its only user, before a start."""
        record = self._recorded()
        if record is not None:
            stop_recorded(record, grace_seconds)
        self._record_path.unlink(missing_ok=True)

    def wait(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        """Returns when the service answers as healthy; raises EngineError when it does not."""
        deadline = clock() + self.start_timeout_seconds
        while clock() < deadline:
            if self.running() is None:
                raise EngineError(
                    f"{self.name} ended while starting. Its log, {self.log_path}, ends with: {last_line(self.log_path)}"
                )
            if self._answers():
                return
            sleep(0.5)
        raise EngineError(
            f"{self.name} was not ready within {self.start_timeout_seconds:g} s. See its log, {self.log_path}."
        )

    def _answers(self) -> bool:
        try:
            answer = httpx.get(self.url + self.health_path, timeout=5)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200 and self.healthy(answer.text)


def mlflow_service(home: Path, port: int) -> Service:
    """An MLflow tracking server and UI: SQLite for the records, a folder for the artifacts."""
    folder = home / "mlflow"
    return Service(
        name="MLflow",
        command=(
            *(sys.executable, "-m", "mlflow", "server"),
            *("--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"),
            *("--artifacts-destination", str(folder / "artifacts")),
        ),
        port=port,
        folder=folder,
        # One server process serves a laptop; MLflow's job runner would add three more.
        environment={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        health_path="/health",
    )


def airflow_service(home: Path, *, port: int, dags_folder: Path, mlflow_url: str) -> Service:
    """``airflow standalone`` with SQLite and the LocalExecutor, on this machine only."""
    folder = home / "airflow"
    url = f"http://127.0.0.1:{port}"
    settings = {
        "PATH": search_path(sys.executable, os.environ),
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags_folder),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__PARALLELISM": "4",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        # The scheduler ends when SQLite stays locked; on a busy machine a writer may take more than
        # the 5 s that it waits by itself.
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{folder / 'airflow.db'}?timeout=60",
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
        "AIRFLOW__CORE__TEST_CONNECTION": "Enabled",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(folder / "passwords.json"),
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "10",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "60",
        "MLFLOW_TRACKING_URI": mlflow_url,
        HOME_VARIABLE: str(home),
    }
    return Service(
        name="Airflow",
        command=(sys.executable, "-m", "airflow", "standalone"),
        port=port,
        folder=folder,
        environment={**os.environ, **settings},
        health_path="/api/v2/monitor/health",
        healthy=lambda body: not unhealthy_components(json.loads(body)),
    )
