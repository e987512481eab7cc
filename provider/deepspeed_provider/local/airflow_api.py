# SPDX-License-Identifier: Apache-2.0
"""The handful of Airflow REST calls that trigger a DAG run and follow it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tenacity

from deepspeed_provider.errors import EngineError

FINISHED = ("success", "failed")
_COMPONENTS = ("metadatabase", "scheduler", "triggerer", "dag_processor")


def unhealthy_components(health: Mapping[str, Any]) -> list[str]:
    """Those that Airflow's own health report does not call healthy."""
    return [name for name in _COMPONENTS if (health.get(name) or {}).get("status") != "healthy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskState:
    task_id: str
    state: str | None
    try_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One structured line of a task's log."""

    level: str
    logger: str
    text: str


class AirflowApi:
    """A logged-in client of one Airflow, by user name and password of its simple auth manager."""

    def __init__(self, url: str, username: str, password: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=30)
        self._login = {"username": username, "password": password}

    @classmethod
    def of_home(cls, url: str, airflow_home: Path) -> AirflowApi:
        """Logs in with the password that a standalone Airflow wrote into its home."""
        passwords = json.loads((airflow_home / "passwords.json").read_text())
        return cls(url, "admin", passwords["admin"])

    def login(self) -> None:
        answer = self._client.post("/auth/token", json=self._login)
        answer.raise_for_status()
        self._client.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"

    def call(self, method: str, path: str, **options: Any) -> Any:
        """One call under ``/api/v2``; logs in at need. Raises EngineError with the answer's text."""
        answer = self._send(method, path, **options)
        if answer.status_code == 401:
            self.login()
            answer = self._send(method, path, **options)
        if answer.is_error:
            raise EngineError(f"Airflow answered {answer.status_code} to {method} {path}: {answer.text[:500]}")
        return answer.json() if answer.content else None

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        # A busy laptop answers late; asking again does no harm, telling again might.
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(httpx.TransportError),
            stop=tenacity.stop_after_attempt(5 if method == "GET" else 1),
            wait=tenacity.wait_exponential(max=10),
            reraise=True,
        )
        return attempts(self._client.request, method, f"/api/v2{path}", **options)

    def wait_for_dag(
        self,
        dag_id: str,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Returns when the DAG has been parsed; raises EngineError with its import errors."""
        deadline = clock() + timeout_seconds
        while clock() < deadline:
            if self.call("GET", "/dags", params={"dag_id_pattern": dag_id})["total_entries"]:
                return
            errors = self.call("GET", "/importErrors")["import_errors"]
            if errors:
                raise EngineError(f"A DAG file cannot be imported: {errors[0]['filename']}\n{errors[0]['stack_trace']}")
            sleep(1)
        raise EngineError(f"Airflow did not find the DAG {dag_id} within {timeout_seconds:g} s.")

    def unhealthy(self) -> list[str]:
        """Components that have not reported for a while."""
        return unhealthy_components(self.call("GET", "/monitor/health"))

    def trigger(self, dag_id: str, conf: Mapping[str, Any], run_id: str | None = None) -> str:
        """Unpauses the DAG and starts a run; returns the run's id."""
        self.call("PATCH", f"/dags/{dag_id}", json={"is_paused": False})
        body = {"conf": dict(conf), "logical_date": None, **({"dag_run_id": run_id} if run_id else {})}
        return str(self.call("POST", f"/dags/{dag_id}/dagRuns", json=body)["dag_run_id"])

    def fail_unfinished_runs(self, dag_id: str) -> list[str]:
        """Marks what an interrupted session left unfinished as failed, so that it is not resumed."""
        query = {"state": ["queued", "running"]}
        unfinished = self.call("GET", f"/dags/{dag_id}/dagRuns", params=query)["dag_runs"]
        for run in unfinished:
            self.call("PATCH", f"/dags/{dag_id}/dagRuns/{run['dag_run_id']}", json={"state": "failed"})
        return [run["dag_run_id"] for run in unfinished]

    def run_state(self, dag_id: str, run_id: str) -> str:
        return str(self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def tasks(self, dag_id: str, run_id: str) -> list[TaskState]:
        found = self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances")["task_instances"]
        return [
            TaskState(task_id=each["task_id"], state=each["state"], try_number=each["try_number"]) for each in found
        ]

    def log_lines(self, dag_id: str, run_id: str, task: TaskState) -> Iterator[LogLine]:
        """Each line of a task's log, its trigger's lines included."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task.task_id}/logs/{max(task.try_number, 1)}"
        content = self.call("GET", path, params={"full_content": "true"}, headers={"Accept": "application/json"})
        for entry in content["content"]:
            if isinstance(entry, dict):
                yield LogLine(
                    level=str(entry.get("level") or "info").lower(),
                    logger=str(entry.get("logger") or ""),
                    text=str(entry.get("event", "")),
                )

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        return self.call("GET", path, params={"deserialize": "false"})["value"]
