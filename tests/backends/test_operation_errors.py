# SPDX-License-Identifier: Apache-2.0
"""What the error of a Spark Connect operation says of a run whose ranks left no failure file."""

from __future__ import annotations

import pytest
from deepspeed_provider.backends.spark_connect import judge_error
from deepspeed_provider.errors import FailureKind

FROM_A_RANK = """Job aborted due to stage failure: Could not recover from a failed barrier ResultStage.
RuntimeError: rank 0 failed: {cause}
Traceback (most recent call last):
"""
PORT = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: 43103, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


@pytest.mark.parametrize(
    ("error_class", "message", "kind", "said"),
    [
        pytest.param("", FROM_A_RANK.format(cause=PORT), "TRANSIENT", "port on which the ranks", id="port taken"),
        pytest.param("PYTHON_VERSION_MISMATCH", "3.12 and 3.11", "USER", "Python minor versions", id="versions"),
        pytest.param("", "[SPARK-24819] barrier", "CAPACITY", "fewer free task slots", id="too few slots"),
        pytest.param("INVALID_HANDLE.OPERATION_ABANDONED", "", "CANCELLED", "nobody asked", id="abandoned"),
        pytest.param("OPERATION_CANCELED", "", "CANCELLED", "cancelled on the server", id="cancelled"),
        pytest.param("", FROM_A_RANK.format(cause="KeyError: 'x'"), "UNKNOWN", "KeyError: 'x'", id="a rank's own"),
        pytest.param("", "", "UNKNOWN", "without a message", id="nothing said"),
    ],
)
def test_kind_and_words(error_class: str, message: str, kind: str, said: str) -> None:
    failure = judge_error(error_class, message)
    assert (failure.kind, failure.evidence) == (FailureKind(kind), "operation error")
    assert said in failure.message
