# SPDX-License-Identifier: Apache-2.0
"""A Spark Connect server older than 4.2 lacks a call that durable runs need: said at once, and not tried again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from airflow.sdk import Connection
from deepspeed_provider.backends.base import RunIdentity, RunRequest
from deepspeed_provider.backends.connect_wire import ConnectWire
from deepspeed_provider.backends.spark_connect import SparkConnectBackend
from deepspeed_provider.errors import FailureKind, FineTuneError
from deepspeed_provider.hooks.spark_connect import SparkConnectHook
from deepspeed_provider.local.engine import answers
from pyspark.sql.connect.proto import base_pb2

SPARK_4_1 = "the server runs Spark 4.1.1, which lacks the call GetStatus"
NO_SPARK = "older than Spark 4.2, or no Spark Connect server"


class OldServer:
    """The calls of Spark 4.1 that are asked for here; remembers which sessions are open."""

    def __init__(self) -> None:
        self.sessions: set[str] = set()

    def handlers(self):
        calls = {
            "AnalyzePlan": (self._version, base_pb2.AnalyzePlanRequest),
            "ReleaseSession": (self._release, base_pb2.ReleaseSessionRequest),
        }
        return {
            name: grpc.unary_unary_rpc_method_handler(
                answer,
                request_deserializer=request.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, (answer, request) in calls.items()
        }

    def _version(self, request, context):
        self.sessions.add(request.session_id)
        answer = base_pb2.AnalyzePlanResponse(session_id=request.session_id)
        answer.spark_version.version = "4.1.1"
        return answer

    def _release(self, request, context):
        self.sessions.remove(request.session_id)
        return base_pb2.ReleaseSessionResponse(session_id=request.session_id)


@contextmanager
def served(handlers):
    """The port of a gRPC server with these methods of Spark Connect."""
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("spark.connect.SparkConnectService", handlers)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@pytest.fixture
def old():
    return OldServer()


@pytest.fixture(params=["4.1", "no Spark"])
def port_and_text(request, old):
    with served(old.handlers() if request.param == "4.1" else {}) as port:
        yield port, SPARK_4_1 if request.param == "4.1" else NO_SPARK


def ask(port, what):
    backend = SparkConnectBackend(f"sc://127.0.0.1:{port}")
    request = RunRequest(entry="json:loads", payload={}, code=(), output_uri="file:///nowhere", use_gpu=False)
    handle = backend.mint(request, RunIdentity(key="k", generation=1, digest=request.digest))
    if what == "session":
        with backend.session():
            raise AssertionError("a session of a server that is too old")
    elif what == "submit":
        backend.submit(request, handle)
    else:
        backend.poll(handle)


@pytest.mark.parametrize("what", ["session", "submit", "poll"])
def test_it_says_what_is_needed_and_that_trying_again_is_no_use(port_and_text, old, what):
    port, text = port_and_text
    with pytest.raises(FineTuneError, match=text) as caught:
        ask(port, what)
    failure = caught.value.failure
    assert failure.kind is FailureKind.USER
    assert not failure.kind.retryable
    assert "Spark 4.2 or later" in failure.message
    assert not old.sessions, "none is left behind"


def test_it_is_no_engine_that_can_be_used(port_and_text):
    port, _ = port_and_text
    assert not answers(f"sc://127.0.0.1:{port}")
    with ConnectWire(f"sc://127.0.0.1:{port}", user_id="me") as wire:
        assert not wire.healthy(timeout_seconds=2.0)


def test_the_button_of_the_connection_says_so(port_and_text):
    port, text = port_and_text

    class Hook(SparkConnectHook):
        def get_connection(self, conn_id):
            return Connection(conn_id=conn_id, conn_type="spark_connect", host="127.0.0.1", port=port)

    ok, message = Hook().test_connection()
    assert not ok
    assert text in message
    assert "does not answer" not in message
