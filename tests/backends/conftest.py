from __future__ import annotations

import json

import pytest
from deepspeed_provider.local.processes import free_port
from deepspeed_provider.testing.executing import ExecutingWorkspace

from backends import cases
from backends.cases import BackendCase, databricks_jobs

VOLUME = "/Volumes/main/default/files"


@pytest.fixture(params=["spark_connect", "databricks_jobs"])
def case(request) -> BackendCase:
    """Every backend that must keep the contract; each real, on its own kind of cluster."""
    if request.param == "spark_connect":
        return cases.spark_connect_case(request.getfixturevalue("engine"), request.getfixturevalue("tmp_path"))
    return request.getfixturevalue("databricks_jobs_case")


@pytest.fixture
def databricks_jobs_case(tmp_path, monkeypatch) -> BackendCase:
    """A fake workspace, whose tasks are real processes."""

    def unreachable():
        gone = {**workspace.connection, "port": free_port()}
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", json.dumps(gone))
        return databricks_jobs(f"{VOLUME}/code")

    with ExecutingWorkspace(tmp_path) as workspace:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", workspace.connection_json)
        folder = workspace.contents.place(f"{VOLUME}/runs")
        folder.mkdir(parents=True)
        yield BackendCase(
            name="databricks_jobs",
            address=f"{VOLUME}/code",
            unreachable=unreachable,
            count_runs=lambda handle: sum(run.token == handle.token for run in workspace.runs),
            folder=folder,
            uri=f"{VOLUME}/runs",
        )
