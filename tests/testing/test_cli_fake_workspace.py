# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider fake-workspace``: what it prints, what it serves, how it ends, and what it refuses."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from command_line import run
from deepspeed_provider.cli_fake_workspace import SCENARIOS
from deepspeed_provider.testing import endings


def test_every_ending_that_needs_no_more_words_is_a_scenario() -> None:
    makers = {
        name.replace("_", "-")
        for name, made in inspect.getmembers(endings, inspect.isfunction)
        if made.__annotations__.get("return") == "Ending"
        and all(parameter.default is not parameter.empty for parameter in inspect.signature(made).parameters.values())
    }
    assert makers | {"fails"} == set(SCENARIOS)
    assert all(isinstance(make(), endings.Ending) for make in SCENARIOS.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(
            ["--scenario", "stok-out"], ["--scenario 'stok-out' is none. Did you mean 'stock-out'?"], id="near"
        ),
        pytest.param(["--scenario", "xyz"], [f"--scenario 'xyz' is none. Known are {', '.join(SCENARIOS)}."], id="far"),
        pytest.param(["--cloud", "gpc"], ["--cloud 'gpc' is none. Did you mean 'gcp'?"], id="cloud"),
        pytest.param(
            ["--cloud", "azur", "--scenario", "fails", "--scenario", "host-kiled"],
            [
                "--cloud 'azur' is none. Did you mean 'azure'?",
                "--scenario 'host-kiled' is none. Did you mean 'host-killed'?",
            ],
            id="all at once",
        ),
    ],
)
def test_words_that_are_not_known_are_refused(words: list[str], said: list[str]) -> None:
    result = run("fake-workspace", *words)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == said


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = run("fake-workspace", "--port", str(port))
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        f"Port {port} is in use by another program. Stop it or choose another one with --port."
    ]


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The command in the foreground of a process, and its lines up to the connection."""
    command = [sys.executable, "-m", "deepspeed_provider.cli", "fake-workspace", "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said: list[str] = []
            for line in process.stdout:
                said.append(line.rstrip("\n"))
                if line.startswith("export "):
                    break
            yield process, said
        finally:
            process.kill()


def client_of(said: list[str]) -> httpx.Client:
    """As Airflow would connect, from the line that is to be exported."""
    name, _, value = shlex.split(said[-1])[1].partition("=")
    assert name == "AIRFLOW_CONN_DATABRICKS_DEFAULT"
    connection: dict[str, Any] = json.loads(value)
    url = f"{connection['schema']}://{connection['host']}:{connection['port']}"
    assert url in said[0]
    return httpx.Client(base_url=f"{url}/api", headers={"Authorization": f"Bearer {connection['password']}"})


def test_it_serves_what_was_scripted_tells_of_each_request_and_ends_with_ctrl_c() -> None:
    with (
        serving("--cloud", "azure", "--speed", "1e6", "--scenario", "stock-out", "--scenario", "fails") as (
            process,
            said,
        ),
        client_of(said) as client,
    ):
        node_type = client.get("/2.1/clusters/list-node-types").json()["node_types"][0]["node_type_id"]
        spark_version = client.get("/2.1/clusters/spark-versions").json()["versions"][0]["key"]
        cluster = {"node_type_id": node_type, "spark_version": spark_version, "num_workers": 1}
        task = {"task_key": "t", "new_cluster": cluster, "spark_python_task": {"python_file": "/Workspace/t.py"}}
        codes = []
        for _ in range(3):
            run_id = client.post("/2.2/jobs/runs/submit", json={"tasks": [task]}).json()["run_id"]
            codes.append(ended(client, run_id)["status"]["termination_details"]["code"])
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(30) == 0
    assert node_type.startswith("Standard_")
    assert codes == ["CLOUD_FAILURE", "RUN_EXECUTION_ERROR", "SUCCESS"]
    assert len(re.findall(r"^\d\d:\d\d:\d\d  200  POST jobs/runs/submit$", rest, re.MULTILINE)) == 3
    assert rest.endswith("Stopped.\n")
    assert "Traceback" not in rest


def test_requests_go_wrong_as_often_as_asked_for() -> None:
    with serving("--fault-share", "1") as (process, said), client_of(said) as client:
        for _ in range(3):
            with suppress(httpx.TransportError):
                client.get("/2.1/clusters/spark-versions", timeout=10)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(30) == 0
    assert "About 100% of all requests go wrong." in rest
    assert len(re.findall(r"^\d\d:\d\d:\d\d  \S+  GET clusters/spark-versions$", rest, re.MULTILINE)) == 3


def ended(client: httpx.Client, run_id: int) -> dict[str, Any]:
    """The run at its end, a millisecond away."""
    for _ in range(1000):
        found: dict[str, Any] = client.get("/2.2/jobs/runs/get", params={"run_id": run_id}).json()
        if found["status"]["state"] == "TERMINATED":
            return found
    raise AssertionError(f"run {run_id} goes on")
