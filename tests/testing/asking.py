# SPDX-License-Identifier: Apache-2.0
"""Plain HTTP requests to the fake workspace, for what the SDK's client does not let through; and what to submit."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from deepspeed_provider.testing.workspace import TOKEN, FakeWorkspace

CLUSTER = {"spark_version": "16.4.x-gpu-ml-scala2.12", "node_type_id": "g5.xlarge", "num_workers": 0}
SCRIPT = {"python_file": "/Volumes/main/default/code/launcher.py", "parameters": ["--seed", "1"]}


def task(key: str = "train", **more: Any) -> dict[str, Any]:
    return {"task_key": key, "spark_python_task": SCRIPT, "new_cluster": CLUSTER, **more}


def body(*tasks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tasks": list(tasks) or [task()], **more}


def without(name: str) -> dict[str, Any]:
    """A task without one of its fields."""
    return {key: value for key, value in task().items() if key != name}


class Asking:
    """One client; each method gives the JSON, or raises ``httpx.HTTPStatusError`` with the refusal as its text."""

    def __init__(self, workspace: FakeWorkspace, token: str = TOKEN) -> None:
        self.http = httpx.Client(base_url=f"{workspace.url}/api/", headers={"Authorization": f"Bearer {token}"})

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def get(self, endpoint: str, /, **query: Any) -> Any:
        return _json(self.http.get(endpoint, params=query or None))

    def post(self, endpoint: str, json: Any) -> Any:
        return _json(self.http.post(endpoint, json=json))

    def submit(self, *tasks: dict[str, Any], **more: Any) -> int:
        return int(self.post("2.2/jobs/runs/submit", body(*tasks, **more))["run_id"])

    def run(self, run_id: int, **query: Any) -> Any:
        return self.get("2.2/jobs/runs/get", run_id=run_id, **query)

    def output(self, run_id: int) -> Any:
        return self.get("2.2/jobs/runs/get-output", run_id=run_id)

    def runs(self, **query: Any) -> list[int]:
        return [run["run_id"] for run in self.get("2.2/jobs/runs/list", **query).get("runs", [])]

    def cancel(self, run_id: int) -> Any:
        return self.post("2.2/jobs/runs/cancel", {"run_id": run_id})

    def delete(self, run_id: int) -> Any:
        return self.post("2.2/jobs/runs/delete", {"run_id": run_id})


def _json(response: httpx.Response) -> Any:
    if response.is_error:
        raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
    return response.json()


def refusal(error: pytest.ExceptionInfo[httpx.HTTPStatusError]) -> tuple[int, str]:
    """Status and code that a request was refused with."""
    response = error.value.response
    return response.status_code, response.json()["error_code"]
