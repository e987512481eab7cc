"""What the contract suite needs to know of a backend. A new backend adds one case."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_provider.backends.base import Backend, RunHandle, RunIdentity, RunRequest
from deepspeed_provider.backends.databricks_jobs import DatabricksJobsBackend
from deepspeed_provider.backends.jobs_body import JobSettings
from deepspeed_provider.backends.spark_connect import SparkConnectBackend
from deepspeed_provider.local.engine import EmbeddedEngine
from deepspeed_provider.local.processes import free_port

from backends.event_log import jobs_of_operation
from backends.marks import Marks

CLUSTER = {"spark_version": "16.4.x-gpu-ml-scala2.12", "node_type_id": "g5.xlarge", "num_workers": 0}


def spark_connect(url: str) -> SparkConnectBackend:
    return SparkConnectBackend(url)


def databricks_jobs(code_folder: str) -> DatabricksJobsBackend:
    """On the workspace of the environment's default connection; asks again at once."""
    from deepspeed_provider.hooks.databricks import DatabricksWorkspaceHook

    hook = DatabricksWorkspaceHook(sleep=lambda _: None)
    return DatabricksJobsBackend(hook, JobSettings(code_folder=code_folder, cluster=CLUSTER))


CONNECT: Mapping[str, Callable[[str], Backend]] = {"spark_connect": spark_connect, "databricks_jobs": databricks_jobs}
"""A client by the backend's name and one word of address; for processes of their own too."""


def spark_connect_case(engine: EmbeddedEngine, folder: Path) -> BackendCase:
    """On a real engine; it counts by the server's event log."""
    info = engine.ensure()
    return BackendCase(
        name="spark_connect",
        address=info.url,
        unreachable=lambda: SparkConnectBackend(f"sc://127.0.0.1:{free_port()}"),
        count_runs=lambda handle: jobs_of_operation(info.event_log_dir, handle.ids["operation_id"]),
        folder=folder,
        uri=folder.as_uri(),
    )


@dataclass(frozen=True, kw_only=True)
class BackendCase:
    """One backend under test.

    Attributes:
        name: of the backend. address: the word that ``CONNECT`` wants.
        unreachable: a client whose cluster is not there.
        count_runs: how many runs the cluster itself says it started for a handle.
        folder: on this machine, which the cluster knows as ``uri``.
    """

    name: str
    address: str
    unreachable: Callable[[], Backend]
    count_runs: Callable[[RunHandle], int]
    folder: Path
    uri: str

    def connect(self) -> Backend:
        """A new client, as another process would make it."""
        return CONNECT[self.name](self.address)

    def request(self, **payload: Any) -> tuple[RunRequest, Marks]:
        """A request for the trivial training on two ranks, and where its ranks leave their marks."""
        name = uuid.uuid4().hex
        marks = Marks(self.folder / f"marks-{name}")
        request = RunRequest(
            entry="trivial_training:main",
            payload={"name": name, "marks": str(marks.path), **payload},
            code=(str(Path(__file__).with_name("trivial_training.py")),),
            output_uri=f"{self.uri}/{name}",
            gpus_per_node=2,
            use_gpu=False,
        )
        return request, marks

    def identity(self, request: RunRequest, generation: int = 1) -> RunIdentity:
        return RunIdentity(key=request.payload["name"], generation=generation, digest=request.digest)
