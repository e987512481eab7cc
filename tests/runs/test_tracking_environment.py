# SPDX-License-Identifier: Apache-2.0
"""MLflow's usage statistics change the environment from a thread of theirs; a client of ours goes without."""

from __future__ import annotations

import os

import pytest
from deepspeed_provider.runs.tracking import mlflow_client


@pytest.mark.parametrize(("before", "after"), [(None, "true"), ("false", "false")], ids=["by default", "asked for"])
def test_a_client_goes_without_statistics(monkeypatch: pytest.MonkeyPatch, before: str | None, after: str) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", before or "")
    if before is None:
        monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    mlflow_client("http://127.0.0.1:1")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == after
