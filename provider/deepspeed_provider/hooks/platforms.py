# SPDX-License-Identifier: Apache-2.0
"""Where durable runs go: over Spark Connect, or through the Jobs API of a Databricks workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from deepspeed_provider.links import CLUSTER_LOGS_URL_KEY, DATABRICKS_RUN_URL_KEY, SPARK_UI_URL_KEY
from deepspeed_provider.planning import Hardware

if TYPE_CHECKING:
    from deepspeed_provider.backends.base import Backend, RunHandle
    from deepspeed_provider.backends.databricks_jobs import DatabricksJobsBackend
    from deepspeed_provider.backends.jobs_body import JobSettings


class Platform(Protocol):
    """One connection, and what operators and triggers ask of it."""

    def get_backend(self) -> Backend: ...

    async def aget_backend(self) -> Backend:
        """For an event loop: the connection is awaited."""
        ...

    def get_base_uri(self) -> str:
        """Folder under which runs leave their files. Raises where only the user knows it."""
        ...

    def get_hardware(self, *, ranks: int, nodes: int, use_gpu: bool) -> Hardware:
        """The machines that a run will find."""
        ...

    def get_links(self, backend: Backend, handle: RunHandle) -> dict[str, str]:
        """Addresses for people, by the XCom that a link reads."""
        ...


class SparkConnectPlatform:
    """A Spark Connect server, or the embedded engine."""

    def __init__(self, conn_id: str) -> None:
        from deepspeed_provider.hooks.spark_connect import SparkConnectHook

        self._hook = SparkConnectHook(conn_id)

    def get_backend(self) -> Backend:
        return self._hook.get_backend()

    async def aget_backend(self) -> Backend:
        return await self._hook.aget_backend()

    def get_base_uri(self) -> str:
        return self._hook.get_base_uri()

    def get_hardware(self, *, ranks: int, nodes: int, use_gpu: bool) -> Hardware:
        return self._hook.get_hardware(ranks=ranks, nodes=nodes, use_gpu=use_gpu)

    def get_links(self, backend: Backend, handle: RunHandle) -> dict[str, str]:  # noqa: ARG002
        return {SPARK_UI_URL_KEY: self._hook.ui_url} if self._hook.ui_url else {}


class DatabricksPlatform:
    """The Jobs API of a workspace, by Airflow's own ``databricks`` connection.

    :param settings: how runs are submitted; who only looks at runs does without.
    """

    def __init__(self, conn_id: str, settings: JobSettings | None = None) -> None:
        self._conn_id = conn_id
        self._settings = settings

    def get_backend(self) -> DatabricksJobsBackend:
        from deepspeed_provider.backends.databricks_jobs import DatabricksJobsBackend
        from deepspeed_provider.hooks.databricks import DatabricksWorkspaceHook

        return DatabricksJobsBackend(DatabricksWorkspaceHook(self._conn_id), self._settings)

    async def aget_backend(self) -> DatabricksJobsBackend:
        # Asynchronous requests await the connection themselves.
        return self.get_backend()

    def get_base_uri(self) -> str:
        raise AirflowFailException(
            f"A run through the Databricks connection {self._conn_id!r} needs a base_uri: a folder of a Volume that "
            "it may write, such as /Volumes/main/default/fine-tunes."
        )

    def get_hardware(self, *, ranks: int, nodes: int, use_gpu: bool) -> Hardware:
        if ranks % nodes:
            raise AirflowException(f"ranks = {ranks} cannot be shared evenly by nodes = {nodes}.")
        return Hardware(nodes=nodes, gpus_per_node=ranks // nodes, use_gpu=use_gpu)

    def get_links(self, backend: Backend, handle: RunHandle) -> dict[str, str]:
        from deepspeed_provider.backends.base import WithPages

        pages = backend.pages(handle) if isinstance(backend, WithPages) else None
        found = {DATABRICKS_RUN_URL_KEY: pages.run, CLUSTER_LOGS_URL_KEY: pages.cluster_logs} if pages else {}
        return {key: url for key, url in found.items() if url}


def platform_of(
    spark_connect_conn_id: str, databricks_conn_id: str | None, settings: JobSettings | None = None
) -> Platform:
    """The Databricks workspace where one is named, else Spark Connect."""
    if databricks_conn_id:
        return DatabricksPlatform(databricks_conn_id, settings)
    return SparkConnectPlatform(spark_connect_conn_id)
