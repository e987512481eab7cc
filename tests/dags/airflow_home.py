# SPDX-License-Identifier: Apache-2.0
"""An Airflow of its own in which a shipped DAG runs under ``dag.test()``, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "dags"

# After the DAG has run as ``run``: what became of it, for the test to read.
TELL = """
import json
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session

with create_session() as session:
    tasks = {ti.task_id: str(ti.state) for ti in run.get_task_instances(session=session)}
    xcoms = {}
    for row in session.query(XComModel).filter(XComModel.run_id == run.run_id):
        xcoms.setdefault(row.task_id, {})[row.key] = XComModel.deserialize_value(row)
"""
RUN_DAG = """
import json, sys
from airflow.dag_processing.dagbag import DagBag

dag = DagBag(sys.argv[1]).dags[sys.argv[2]]
run = dag.test(run_conf=json.loads(sys.argv[3]))
"""
EVENTS = """
from airflow.models.asset import AssetEvent
with create_session() as session:
    events = [event.extra for event in session.query(AssetEvent)]
print("FOUND" + json.dumps({"state": str(run.state), "tasks": tasks, "xcoms": xcoms, "events": events}, default=str))
"""


class AirflowHome:
    """SQLite, and the shipped DAGs' folder."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = home
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(home),
            "AIRFLOW_HOME": str(home / "airflow"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(FOLDER),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            **environment,
        }
        subprocess.run(
            [sys.executable, "-m", "airflow", "db", "migrate"],
            env=self.environment,
            check=True,
            capture_output=True,
            timeout=240,
        )

    def run_dag(self, dag_id: str, conf: dict[str, Any], *, timeout_seconds: float) -> dict[str, Any]:
        """Runs a shipped DAG to its end; ``state``, ``tasks``, ``xcoms`` by task, ``events`` of assets, and ``log``."""
        return self.run(RUN_DAG + TELL + EVENTS, dag_id, json.dumps(conf), timeout_seconds=timeout_seconds)

    def run(self, script: str, *words: str, timeout_seconds: float) -> dict[str, Any]:
        """Runs a script that prints FOUND and an object; returns that with all that was printed as ``log``."""
        answer = subprocess.run(
            [sys.executable, "-c", script, str(FOLDER), *words],
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.home,
            check=False,
            timeout=timeout_seconds,
        )
        assert "FOUND" in answer.stdout, (answer.stdout + answer.stderr)[-6000:]
        return {**json.loads(answer.stdout.rpartition("FOUND")[2]), "log": answer.stdout + answer.stderr}
