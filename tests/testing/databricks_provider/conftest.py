# SPDX-License-Identifier: Apache-2.0
"""A workspace in which every look at a run takes a minute and a half of virtual time, and a task in front of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deepspeed_provider.testing.workspace import FakeWorkspace

from testing.databricks_provider.task import DatabricksTask

LOOK_S = 90.0


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWorkspace]:
    with FakeWorkspace(poll_s=LOOK_S) as started:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", started.connection_json)
        yield started


@pytest.fixture(params=[False, True], ids=["blocking", "deferrable"])
def task(request: pytest.FixtureRequest) -> DatabricksTask:
    return DatabricksTask(options={"deferrable": request.param})
