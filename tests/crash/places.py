"""Where runs go, and how the cluster itself counts them: never by what Airflow or our own record believes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import psutil
from backends.event_log import jobs_of_operation
from backends.marks import Marks
from backends.processes import alive
from deepspeed_provider.local.engine import EmbeddedEngine
from deepspeed_provider.testing.run_json import Run as WorkspaceRun
from deepspeed_provider.testing.workspace import FakeWorkspace

from crash.runs import Run
from crash.stack import Stack

VOLUME = "/Volumes/main/default/runs"
CLUSTER = {"spark_version": "16.4.x-gpu-ml-scala2.12", "node_type_id": "g5.xlarge", "num_workers": 0}
JOB = json.dumps({"cluster": CLUSTER, "code_folder": "/Volumes/main/default/code"})


class Place(Protocol):
    """One kind of cluster."""

    stack: Stack

    def trigger(self, mode: str, **conf: Any) -> Run:
        """A DAG run whose task runs here."""
        ...

    def require_runs(self, run: Run, count: int) -> None:
        """So many runs really were there, each once, and nothing of them is left."""
        ...

    def require_cancelled(self, run: Run) -> None:
        """The only run was cancelled, and nothing of it is left."""
        ...


class SparkConnectPlace:
    """The embedded engine; the server's event log counts the Spark jobs of an operation."""

    def __init__(self, stack: Stack, engine: EmbeddedEngine) -> None:
        self.stack = stack
        self._engine = engine

    def trigger(self, mode: str, **conf: Any) -> Run:
        self._engine.ensure()
        return Run(self.stack, mode, **conf)

    def require_runs(self, run: Run, count: int) -> None:
        require_ranks(run, count)
        results = [run.result(task["map_index"]) for task in run.tasks if task["state"] == "success"]
        events = self._engine.ensure().event_log_dir
        for result in results:
            assert jobs_of_operation(events, result["ids"]["operation_id"]) == 1

    def require_cancelled(self, run: Run) -> None:
        # On a busy machine a deadline may pass before the ranks are up.
        assert len(run.names()) <= 1, str(run)
        run.wait_until_ranks_are_gone()


class WorkspacePlace:
    """A fake workspace; it counts the submissions that became runs.

    Args:
        conn_id: of the Airflow connection to it.
        executes: whether ranks really run, and leave their marks.
    """

    def __init__(self, stack: Stack, workspace: FakeWorkspace, conn_id: str, *, executes: bool = False) -> None:
        self.stack = stack
        self.workspace = workspace
        self._conn_id = conn_id
        self._executes = executes

    def trigger(self, mode: str, **conf: Any) -> Run:
        return Run(self.stack, mode, databricks=self._conn_id, job=JOB, base_uri=VOLUME, **conf)

    def runs(self, run: Run) -> list[WorkspaceRun]:
        """Those of one DAG run, in the order in which they were submitted."""
        return [each for each in self.workspace.runs if run.run_id in each.name]

    def codes(self, run: Run) -> list[str | None]:
        """How each of its runs ended; None for one that has not."""
        return [self._code(each) for each in self.runs(run)]

    def _code(self, run: WorkspaceRun) -> str | None:
        ending = run.course(self.workspace.clock.now_ms).ending
        return None if ending is None else ending.code

    def require_runs(self, run: Run, count: int) -> None:
        found = self.runs(run)
        assert len(found) == count == len({each.token for each in found}), str(run)
        assert None not in self.codes(run), f"{self.codes(run)}: {run}"
        if self._executes:
            require_ranks(run, count)

    def require_cancelled(self, run: Run) -> None:
        assert self.codes(run) == ["USER_CANCELED"], str(run)
        assert len(run.names()) <= 1, str(run)
        run.wait_until_ranks_are_gone()


def require_ranks(run: Run, count: int) -> None:
    """Both ranks of each run began once, and have ended."""
    assert list(run.names().values()) == [[0, 1]] * count, f"{run.names()}: {run}"
    run.wait_until_ranks_are_gone(30)


def left_by_runs(folder: Path) -> list[int]:
    """Pids of what runs of a stack started and that still runs: ranks, and whole programs of the workspace."""
    ranks = [pid for path in folder.glob("runs/*/marks") for pid in Marks(path).pids()]
    programs = folder / "workspace" / "programs"
    return [*alive(ranks), *(each.pid for each in psutil.process_iter() if is_below(programs, each))]


def is_below(folder: Path, process: psutil.Process) -> bool:
    """Whether a process works in the folder, or below it."""
    try:
        return Path(process.cwd()).is_relative_to(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
