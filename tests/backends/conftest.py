from __future__ import annotations

import pytest
from deepspeed_provider.backends.spark_connect import SparkConnectBackend
from deepspeed_provider.local.processes import free_port

from backends.cases import BackendCase
from backends.event_log import jobs_of_operation


@pytest.fixture(params=["spark_connect"])
def case(request, tmp_path) -> BackendCase:
    """Every backend that must keep the contract; each real, on its own kind of cluster."""
    engine = request.getfixturevalue("engine")
    info = engine.ensure()
    return BackendCase(
        name="spark_connect",
        connect=lambda: SparkConnectBackend(info.url),
        unreachable=lambda: SparkConnectBackend(f"sc://127.0.0.1:{free_port()}"),
        count_runs=lambda handle: jobs_of_operation(info.event_log_dir, handle.ids["operation_id"]),
        folder=tmp_path,
    )
