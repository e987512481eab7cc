# SPDX-License-Identifier: Apache-2.0
"""Which server a connection means, and that its token stays inside."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException
from deepspeed_provider.hooks import spark_connect
from deepspeed_provider.hooks.spark_connect import Server, SparkConnectHook, installed_clients, require_one_client

TOKEN = "dapi-very;secret/token"


class HookOf(SparkConnectHook):
    """Reads one connection, or none, and remembers how it was asked for."""

    def __init__(self, connection: Connection | None, conn_id: str = "spark_connect_default") -> None:
        super().__init__(conn_id)
        self.connection = connection

    def get_connection(self, conn_id: str) -> Connection:  # type: ignore[override]
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._found()
        raise RuntimeError("You cannot use AsyncToSync in the same thread as an async event loop")

    async def aget_connection(self, conn_id: str) -> Connection:  # type: ignore[override]
        return self._found()

    def _found(self) -> Connection:
        if self.connection is None:
            raise AirflowNotFoundException("not defined")
        return self.connection


def connection(**fields: Any) -> Connection:
    return Connection(conn_id="c", conn_type="spark_connect", **fields)


@pytest.mark.parametrize(
    ("fields", "url", "user_id"),
    [
        pytest.param({"host": "h"}, "sc://h:15002", "airflow", id="host only"),
        pytest.param({"host": "h", "port": 443}, "sc://h:443", "airflow", id="port"),
        pytest.param({"host": "sc://h/", "port": 1}, "sc://h:1", "airflow", id="host pasted with its scheme"),
        pytest.param({"host": "h", "extra": '{"use_ssl": true}'}, "sc://h:15002/;use_ssl=true", "airflow", id="TLS"),
        pytest.param({"host": "h", "extra": '{"user_id": "etl"}'}, "sc://h:15002", "etl", id="user id"),
        pytest.param(
            {"host": "h", "password": TOKEN},
            "sc://h:15002/;token=dapi-very%3Bsecret%2Ftoken",
            "airflow",
            id="token, quoted",
        ),
    ],
)
def test_remote_server(fields: dict[str, Any], url: str, user_id: str) -> None:
    for server in (
        HookOf(connection(**fields)).get_server(),
        asyncio.run(HookOf(connection(**fields)).aget_server()),
    ):
        assert (server.url, server.user_id, server.embedded) == (url, user_id, False)


@pytest.mark.parametrize(
    "found",
    [None, connection(), connection(host="local"), connection(host=" Embedded ")],
    ids=["not defined", "no host", "local", "embedded"],
)
def test_the_embedded_engine_is_the_default(found: Connection | None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Server(url="sc://127.0.0.1:1", embedded=True)
    monkeypatch.setattr(spark_connect, "_embedded", lambda: engine)
    assert HookOf(found).get_server() is engine
    assert asyncio.run(HookOf(found).aget_server()) is engine


def test_a_name_that_is_not_defined_is_not_the_engine() -> None:
    with pytest.raises(AirflowException, match="'mine' is not defined"):
        HookOf(None, "mine").get_server()
    with pytest.raises(AirflowException, match="'mine' is not defined"):
        asyncio.run(HookOf(None, "mine").aget_server())


def test_a_foreign_server_needs_a_folder_that_it_can_reach() -> None:
    with pytest.raises(AirflowException, match="has no 'base_uri'"):
        HookOf(connection(host="h")).get_base_uri()
    given = connection(host="h", extra='{"base_uri": "s3a://b/runs/"}')
    assert HookOf(given).get_base_uri() == "s3a://b/runs"


def test_ranks_are_shared_evenly() -> None:
    hardware = HookOf(connection(host="h")).get_hardware(ranks=8, nodes=2, use_gpu=True)
    assert (hardware.nodes, hardware.gpus_per_node, hardware.ranks) == (2, 4, 8)
    with pytest.raises(AirflowException, match="cannot be shared evenly"):
        HookOf(connection(host="h")).get_hardware(ranks=3, nodes=2, use_gpu=True)


@pytest.mark.parametrize(
    ("installed", "text"),
    [({"pyspark", "pyspark-client"}, "Both pyspark and pyspark-client"), (set(), r"\[connect\].*\[local\]")],
    ids=["both", "neither"],
)
def test_one_client_is_needed(installed: set[str], text: str) -> None:
    with pytest.raises(AirflowException, match=text):
        require_one_client(installed)


def test_one_client_is_enough() -> None:
    require_one_client({"pyspark"})
    require_one_client({"pyspark-client"})
    require_one_client(installed_clients())


def test_the_token_is_nowhere_to_be_seen(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        hook = HookOf(connection(host="127.0.0.1", port=1, password=TOKEN))
        backend = hook.get_backend()
        ok, message = hook.test_connection()
    assert not ok
    for text in (repr(hook), repr(hook.get_server()), repr(backend), message, caplog.text):
        assert "very" not in text


def test_the_button_says_why_it_fails() -> None:
    ok, message = HookOf(connection(host="127.0.0.1", port=1)).test_connection()
    assert not ok
    assert "does not answer" in message


@pytest.mark.slow
def test_the_button_shows_the_version(engine: Any) -> None:
    port = int(engine.url.rpartition(":")[2])
    ok, message = HookOf(connection(host="127.0.0.1", port=port)).test_connection()
    assert ok, message
    assert message.startswith("Spark 4.")
