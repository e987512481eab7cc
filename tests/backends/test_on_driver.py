# SPDX-License-Identifier: Apache-2.0
"""Work for the driver alone goes where a run has a driver of its own."""

from __future__ import annotations

import pytest
from deepspeed_provider.backends.base import RunIdentity, RunRequest
from deepspeed_provider.backends.spark_connect import SparkConnectBackend
from deepspeed_provider.local.processes import free_port


def test_spark_connect_refuses_it_before_it_connects() -> None:
    backend = SparkConnectBackend(f"sc://127.0.0.1:{free_port()}")
    request = RunRequest(entry="m:f", payload={}, code=(), output_uri="file:///tmp/run", on_driver=True)
    handle = backend.mint(request, RunIdentity(key="k", generation=1, digest=request.digest))
    with pytest.raises(ValueError, match=r"done in a session\(\)"):
        backend.submit(request, handle)
