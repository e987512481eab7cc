# SPDX-License-Identifier: Apache-2.0
"""The fixtures that users get: what they lead to, what they leave behind, and that loading them costs nothing."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
from deepspeed_provider.hooks.spark_connect import SparkConnectHook
from deepspeed_provider.testing import pytest_plugin
from deepspeed_provider.testing.memory_cluster import FakeBackend, FakeCluster
from deepspeed_provider.testing.workspace import FakeWorkspace
from test_imports import HEAVY, ROOT, loaded_by

pytest_plugins = ("pytester",)

NAME = pytest_plugin.__name__


def test_loading_the_plugin_loads_nothing_else_of_weight(tmp_path: Path) -> None:
    assert not loaded_by([NAME], tmp_path) & {*HEAVY, "airflow", "aiohttp", "httpx", "requests"}


def test_the_plugin_is_taken_once_by_entry_point_and_by_name() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    [(entry, module)] = declared.items()
    assert module == NAME
    manager = pytest.PytestPluginManager()
    manager.register(pytest_plugin, entry)  # as an entry point is
    manager.import_plugin(module)  # as -p and pytest_plugins do
    assert [plugin for _, plugin in manager.list_name_plugin()].count(pytest_plugin) == 1


def test_a_workspace_ends_with_its_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(fake_workspace): print('\\nURL', fake_workspace.url)")
    result = pytester.runpytest_inprocess("-p", NAME, "-s", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    [url] = [line.split()[1] for line in result.outlines if line.startswith("URL")]
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_the_databricks_hook_finds_the_workspace(databricks_connection: str, fake_workspace: FakeWorkspace) -> None:
    from airflow.providers.databricks.hooks.databricks import DatabricksHook

    answers, message = DatabricksHook(databricks_connection).test_connection()
    assert answers, message
    assert fake_workspace.requests


def test_a_client_that_waits_sees_the_run_end_at_once(fake_workspace: FakeWorkspace) -> None:
    task = {
        "task_key": "t",
        "new_cluster": {
            "spark_version": fake_workspace.spark_versions[0]["key"],
            "node_type_id": fake_workspace.node_types[0]["node_type_id"],
            "num_workers": 1,
        },
        "spark_python_task": {"python_file": "/Workspace/t.py"},
    }
    headers = {"Authorization": f"Bearer {fake_workspace.connection['password']}"}
    with httpx.Client(base_url=f"{fake_workspace.url}/api/2.2/jobs/runs", headers=headers) as client:
        run_id = client.post("/submit", json={"tasks": [task]}).json()["run_id"]
        assert client.get("/get", params={"run_id": run_id}).json()["status"]["state"] == "TERMINATED"


@pytest.mark.parametrize("conn_id", [SparkConnectHook.default_conn_name, "gpu_cluster"], ids=["default", "another"])
def test_our_hook_finds_the_cluster_in_memory(
    conn_id: str, fake_spark_connect: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", fake_spark_connect.connection_json)
    hook = SparkConnectHook(conn_id)
    for backend in (hook.get_backend(), asyncio.run(SparkConnectHook(conn_id).aget_backend())):
        assert isinstance(backend, FakeBackend)
        assert backend.cluster is fake_spark_connect
    assert hook.test_connection() == (True, "Spark in memory answers.")
    assert hook.get_hardware(ranks=4, nodes=2, use_gpu=True).gpus_per_node == 2


def test_nothing_is_tracked_on_a_server_that_tests_happen_to_know(pytester: pytest.Pytester, monkeypatch: Any) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://production.example")
    pytester.makepyfile("import os\ndef test_it(fake_spark_connect): assert 'MLFLOW_TRACKING_URI' not in os.environ")
    pytester.runpytest_inprocess("-p", NAME, "-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_the_hook_is_itself_again_afterwards(pytester: pytest.Pytester) -> None:
    before = SparkConnectHook.make_backend
    pytester.makepyfile("def test_it(fake_spark_connect): pass")
    pytester.runpytest_inprocess("-p", NAME, "-p", "no:cacheprovider").assert_outcomes(passed=1)
    assert SparkConnectHook.make_backend is before
