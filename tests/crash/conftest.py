"""One Airflow for all tests that end its processes, with every kind of cluster that its tasks can run on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from deepspeed_provider.local.engine import EmbeddedEngine, EngineSettings
from deepspeed_provider.testing import faults
from deepspeed_provider.testing.executing import ExecutingWorkspace
from deepspeed_provider.testing.workspace import FakeWorkspace, behaviour
from operators.chaos import FAULT_SHARE, SEED

from crash.guardian import guarded
from crash.places import Place, SparkConnectPlace, WorkspacePlace
from crash.scenarios import AT_ONCE, EXECUTING, PLAYED, SPARK_CONNECT
from crash.stack import Stack, standalone

SIDE_BY_SIDE = 4
# Those of a task that is mapped over three, and of all other scenarios meanwhile.
RANKS = 2 * (3 + SIDE_BY_SIDE - 1)
FAULTY = "databricks_faulty"
FAULTS = faults.every_kind(late_s=0.5, retry_after_s=1, long_retry_after_s=3)
# A submission is carried out at once, and answered after so long: a worker can be killed in between.
ANSWER_SECONDS = 3.0
# What a played run takes, in real seconds.
RUN_SECONDS = 8.0


@dataclass(frozen=True, kw_only=True)
class Grounds:
    """``places`` by name; a Databricks one's is the id of its connection, too."""

    stack: Stack
    places: dict[str, Place]


@pytest.fixture(scope="session")
def grounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grounds]:
    folder = tmp_path_factory.mktemp("crash")
    with guarded(folder), ExitStack() as opened:
        executing = ExecutingWorkspace(folder / "workspace")
        executing.fault(faults.late(ANSWER_SECONDS), path="jobs/runs/submit", times=10_000)
        workspaces = {
            EXECUTING: executing,
            AT_ONCE: FakeWorkspace(speed=1.0),
            PLAYED: FakeWorkspace(speed=1.0),
            FAULTY: FakeWorkspace(
                speed=1.0, faults=faults.RandomFaults(FAULT_SHARE, kinds=FAULTS, chance=random.Random(SEED))
            ),
        }
        workspaces[AT_ONCE].default_behaviour = behaviour(start_s=0, run_s=0.001, stop_s=0)
        workspaces[PLAYED].default_behaviour = behaviour(
            start_s=0, run_s=RUN_SECONDS, stop_s=0, running_as="A_STATE_OF_TOMORROW"
        )
        for workspace in workspaces.values():
            opened.enter_context(workspace)
        connections = {f"AIRFLOW_CONN_{name.upper()}": each.connection_json for name, each in workspaces.items()}
        engine = EmbeddedEngine(folder, EngineSettings(ranks=RANKS, ui_port=None))
        opened.callback(engine.stop)
        stack = opened.enter_context(standalone(folder, connections))
        places: dict[str, Place] = {SPARK_CONNECT: SparkConnectPlace(stack, engine)}
        for name, workspace in workspaces.items():
            places[name] = WorkspacePlace(stack, workspace, name, executes=workspace is executing)
        yield Grounds(stack=stack, places=places)
