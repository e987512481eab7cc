# SPDX-License-Identifier: Apache-2.0
"""Connection to a Spark Connect server, or to the embedded engine where none is defined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException

from deepspeed_provider.errors import FineTuneError
from deepspeed_provider.planning import Hardware

if TYPE_CHECKING:
    from deepspeed_provider.backends.spark_connect import SparkConnectBackend

DEFAULT_PORT = 15002
DEFAULT_USER_ID = "airflow"
LOCAL_HOSTS = ("", "local", "embedded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where a Spark Connect server is and how to be let in. The URL may hold a token: never shown."""

    url: str = field(repr=False)
    user_id: str = DEFAULT_USER_ID
    ui_url: str | None = None
    base_uri: str | None = None
    embedded: bool = False
    ranks: int | None = None
    """How many training processes fit side by side, where known."""


def connect(server: Server) -> SparkConnectBackend:
    """Runs on the server; nothing is sent yet."""
    require_one_client(installed_clients())
    from deepspeed_provider.backends.spark_connect import SparkConnectBackend

    return SparkConnectBackend(server.url, user_id=server.user_id)


class SparkConnectHook(BaseHook):
    """Finds the Spark Connect server of a connection.

    Without such a connection, or where its host is empty or ``local``, it is the embedded engine on this
    machine, which is started when it does not run.

    :param spark_connect_conn_id: connection of type ``spark_connect``. Its password is the server's bearer
        token; extra holds ``user_id``, ``use_ssl``, ``ui_url`` and ``base_uri``.
    """

    conn_name_attr = "spark_connect_conn_id"
    default_conn_name = "spark_connect_default"
    conn_type = "spark_connect"
    hook_name = "Spark Connect"

    make_backend: Callable[[Server], SparkConnectBackend] = staticmethod(connect)
    """Replaced by tests that have a cluster of their own."""

    def __init__(self, spark_connect_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.spark_connect_conn_id = spark_connect_conn_id
        self._server: Server | None = None

    def get_server(self) -> Server:
        """The server; starts the embedded engine when that is meant. Not for an event loop."""
        if self._server is None:
            try:
                connection = self.get_connection(self.spark_connect_conn_id)
            except AirflowNotFoundException:
                connection = None
                self._require_default()
            if connection is None or _means_embedded(connection):
                self._server = _embedded()
            else:
                self._server = _remote(connection, connection.extra_dejson)
        return self._server

    async def aget_server(self) -> Server:
        """``get_server`` for an event loop: the connection is awaited, the engine started in a thread."""
        if self._server is None:
            try:
                connection = await self.aget_connection(self.spark_connect_conn_id)
            except AirflowNotFoundException:
                connection = None
                self._require_default()
            if connection is None or _means_embedded(connection):
                self._server = await asyncio.to_thread(_embedded)
            else:
                self._server = _remote(connection, await connection.aextra_dejson())
        return self._server

    def get_url(self) -> str:
        """``sc://…``, token included: not for logs."""
        return self.get_server().url

    async def aget_url(self) -> str:
        return (await self.aget_server()).url

    def get_backend(self) -> SparkConnectBackend:
        return self.make_backend(self.get_server())

    async def aget_backend(self) -> SparkConnectBackend:
        return self.make_backend(await self.aget_server())

    def get_conn(self) -> SparkConnectBackend:
        return self.get_backend()

    @property
    def ui_url(self) -> str | None:
        """Address of the Spark UI, where known."""
        return self.get_server().ui_url

    def get_base_uri(self) -> str:
        """Folder under which runs leave their files, reachable from the cluster."""
        server = self.get_server()
        if server.base_uri:
            return server.base_uri.rstrip("/")
        if not server.embedded:
            raise AirflowException(
                f"Connection {self.spark_connect_conn_id!r} has no 'base_uri': give a folder that the cluster can "
                "read and write, for example s3a://bucket/fine-tunes, in the connection or as the operator's base_uri."
            )
        from deepspeed_provider.local.engine import default_home

        return (default_home() / "runs").as_uri()

    def get_hardware(self, *, ranks: int, nodes: int, use_gpu: bool) -> Hardware:
        """The hardware of the server; cores and memory are known of the embedded engine's machine only.

        Raises:
            AirflowException: when the ranks cannot be shared evenly by the nodes.
        """
        if ranks % nodes:
            raise AirflowException(f"ranks = {ranks} cannot be shared evenly by nodes = {nodes}.")
        if not self.get_server().embedded:
            return Hardware(nodes=nodes, gpus_per_node=ranks // nodes, use_gpu=use_gpu)
        import os

        import psutil

        fitting = min(ranks, self.get_server().ranks or ranks)
        return Hardware(
            nodes=nodes,
            gpus_per_node=fitting // nodes or 1,
            use_gpu=use_gpu,
            cores=os.cpu_count(),
            host_bytes=psutil.virtual_memory().total,
        )

    def test_connection(self) -> tuple[bool, str]:
        """Opens a session and asks for Spark's version."""
        try:
            with self.get_backend().session() as spark:
                return True, f"Spark {spark.version} answers."
        except FineTuneError as error:
            return False, _without_secret(error.failure.message, self._server)
        except Exception as error:  # noqa: BLE001  (the form shows one sentence whatever went wrong)
            return False, f"{type(error).__name__}: {_without_secret(str(error), self._server)}"

    def _require_default(self) -> None:
        if self.spark_connect_conn_id != self.default_conn_name:
            raise AirflowException(
                f"Connection {self.spark_connect_conn_id!r} is not defined. Define it with the type 'spark_connect', "
                f"or use {self.default_conn_name!r}, which is the embedded engine where it is not defined."
            )


def require_one_client(installed: set[str]) -> None:
    """Refuses an environment with no Spark Connect client, or with two that overwrite each other.

    :param installed: which of ``pyspark`` and ``pyspark-client`` are installed.
    """
    if installed == {"pyspark", "pyspark-client"}:
        raise AirflowException(
            "Both pyspark and pyspark-client are installed; they share the import name 'pyspark' and break each other. "
            "Uninstall both, then install airflow-provider-deepspeed[connect] (a client for a server that runs "
            "elsewhere) or airflow-provider-deepspeed[local] (the embedded engine included), not both."
        )
    if not installed:
        raise AirflowException(
            "No Spark Connect client is installed. Install airflow-provider-deepspeed[connect] for a server that runs "
            "elsewhere, or airflow-provider-deepspeed[local] for the embedded engine."
        )


def installed_clients() -> set[str]:
    """Which distributions of the Spark Connect client this environment has."""
    found = set()
    for name in ("pyspark", "pyspark-client"):
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
    return found


def _means_embedded(connection: Any) -> bool:
    return (connection.host or "").strip().lower() in LOCAL_HOSTS


def _embedded() -> Server:
    require_one_client(installed_clients())
    from deepspeed_provider.local.engine import ensure_engine

    engine = ensure_engine()
    return Server(url=engine.url, ui_url=engine.ui_url, embedded=True, ranks=engine.ranks)


def _remote(connection: Any, extra: dict[str, Any]) -> Server:
    host = connection.host.strip().removeprefix("sc://").rstrip("/")
    parameters = []
    if connection.password:
        parameters.append(f"token={quote(connection.password, safe='')}")
    elif extra.get("use_ssl"):
        parameters.append("use_ssl=true")
    return Server(
        url=f"sc://{host}:{connection.port or DEFAULT_PORT}" + ("/;" + ";".join(parameters) if parameters else ""),
        user_id=extra.get("user_id") or DEFAULT_USER_ID,
        ui_url=extra.get("ui_url") or None,
        base_uri=extra.get("base_uri") or None,
    )


def _without_secret(text: str, server: Server | None) -> str:
    """``text`` without the server's token, should a library have quoted the URL."""
    if server is None or "token=" not in server.url:
        return text
    token = server.url.partition("token=")[2].partition(";")[0]
    return text.replace(server.url, "sc://…").replace(token, "***")
