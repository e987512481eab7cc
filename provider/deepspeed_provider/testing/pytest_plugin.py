# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of your own DAGs; docs/testing.md shows them at work.

Every pytest of an environment with this provider loads this module, so it imports nothing but pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from deepspeed_provider.testing.memory_cluster import FakeCluster
    from deepspeed_provider.testing.workspace import FakeWorkspace

# Longer than a run that nobody has scripted takes: the first look at it finds it ended.
POLL_SECONDS: Final = 3600.0
DATABRICKS_CONNECTION: Final = "databricks_default"


@pytest.fixture
def fake_workspace() -> Iterator[FakeWorkspace]:
    """A fake Databricks workspace on a free port of this machine.

    Each question about a run lets an hour pass there, so that nobody waits; set ``fake_workspace.clock.poll_s`` to
    see a run go through its states.
    """
    from deepspeed_provider.testing.workspace import FakeWorkspace

    with FakeWorkspace(poll_s=POLL_SECONDS) as workspace:
        yield workspace


@pytest.fixture
def databricks_connection(fake_workspace: FakeWorkspace, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of Airflow's default Databricks connection, which leads to the fake workspace.

    The Databricks provider keeps of a connection's host only the name, so scheme and port are fields of their own.
    For a connection of another id set its variable to ``fake_workspace.connection_json``.
    """
    monkeypatch.setenv(f"AIRFLOW_CONN_{DATABRICKS_CONNECTION.upper()}", fake_workspace.connection_json)
    return DATABRICKS_CONNECTION


@pytest.fixture
def fake_spark_connect(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """A cluster in memory, which every Spark Connect connection leads to; the default one is defined.

    A connection of another id has to be defined: set its variable to ``fake_spark_connect.connection_json``. Runs
    are not tracked, unless an operator names its MLflow server.
    """
    from deepspeed_provider.hooks.spark_connect import SparkConnectHook
    from deepspeed_provider.testing.memory_cluster import FakeBackend, FakeCluster

    cluster = FakeCluster()
    monkeypatch.setattr(SparkConnectHook, "make_backend", staticmethod(lambda _: FakeBackend(cluster)))
    monkeypatch.setenv(f"AIRFLOW_CONN_{SparkConnectHook.default_conn_name.upper()}", cluster.connection_json)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return cluster
