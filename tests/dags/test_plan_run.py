# SPDX-License-Identifier: Apache-2.0
"""dags/plan.py under ``dag.test()``, with a person who answers through Airflow's own REST API."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "dags"

RUN = """
import json, sys, threading
from airflow.api_fastapi.app import create_app
from airflow.dag_processing.dagbag import DagBag
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from fastapi.testclient import TestClient
from sqlalchemy.orm import configure_mappers

folder, choice, conf = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
asked, over, app = [], threading.Event(), create_app("core")
configure_mappers()  # imports what two threads at once would wait for


def answer():
    with TestClient(app) as client:
        path = "/api/v2/dags/plan/dagRuns/~/hitlDetails"
        while not asked:
            if over.wait(0.5):
                return  # nobody was asked
            # The request is written just before the task waits.
            asked.extend(client.get(path, params={"state": "awaiting_input"}).json()["hitl_details"])
        task = asked[0]["task_instance"]
        where = f"/api/v2/dags/plan/dagRuns/{task['dag_run_id']}/taskInstances/{task['task_id']}/-1/hitlDetails"
        answered = client.patch(where, json={"chosen_options": [choice], "params_input": {}})
        assert answered.status_code == 200, answered.text


person = threading.Thread(target=answer)
person.start()
try:
    run = DagBag(folder).dags["plan"].test(run_conf=conf)
finally:
    over.set()
    person.join()
with create_session() as session:
    tasks = {ti.task_id: str(ti.state) for ti in run.get_task_instances(session=session)}
    xcoms = {}
    for row in session.query(XComModel).filter(XComModel.run_id == run.run_id):
        xcoms.setdefault(row.task_id, {})[row.key] = XComModel.deserialize_value(row)
found = {"state": str(run.state), "tasks": tasks, "xcoms": xcoms, "asked": asked}
print("FOUND" + json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def plan_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the DAG in an Airflow of its own, gives the answer, and returns what became of it."""
    home = tmp_path_factory.mktemp("plan-run")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(home),
        "AIRFLOW_HOME": str(home / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(FOLDER),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
    }
    subprocess.run(
        [sys.executable, "-m", "airflow", "db", "migrate"],
        env=environment,
        check=True,
        capture_output=True,
        timeout=240,
    )

    def run(choice: str, conf: dict[str, Any]) -> dict[str, Any]:
        answer = subprocess.run(
            [sys.executable, "-c", RUN, str(FOLDER), choice, json.dumps(conf)],
            capture_output=True,
            text=True,
            env=environment,
            cwd=home,
            check=False,
            timeout=240,
        )
        assert "FOUND" in answer.stdout, (answer.stdout + answer.stderr)[-6000:]
        return {**json.loads(answer.stdout.rpartition("FOUND")[2]), "log": answer.stdout + answer.stderr}

    return run


@pytest.mark.slow
def test_an_approved_plan_reaches_the_task_behind_it(plan_run: Any) -> None:
    run = plan_run("Approve", {"model": "gpt2", "tokens": 1_000_000, "sequence_length": "512", "cloud": "aws"})
    assert run["state"] == "success", run["log"][-6000:]
    assert set(run["tasks"].values()) == {"success"}
    planned = run["xcoms"]["plan"]
    chosen = planned["return_value"]["chosen"]
    (asked,) = run["asked"]
    assert asked["subject"] == "May gpt2 be fine-tuned at this price?"
    assert asked["body"] == planned["markdown"]
    assert f"| **{chosen['node_type_id']}** |" in asked["body"]
    assert chosen["price_date"] in asked["body"]
    assert asked["defaults"] == ["Reject"]
    assert run["xcoms"]["show"]["return_value"] == chosen
    assert '"num_workers"' in run["log"]
    assert chosen["cloud"] == "aws"


@pytest.mark.slow
def test_nothing_follows_a_plan_that_is_rejected(plan_run: Any) -> None:
    run = plan_run("Reject", {"model": "gpt2", "tokens": "1M", "sequence_length": 512, "budget_usd": 20})
    assert run["tasks"] == {"plan": "success", "approve": "success", "show": "skipped"}, run["log"][-6000:]
    assert run["xcoms"]["plan"]["return_value"]["chosen"]["usd"] <= 20


@pytest.mark.slow
def test_nobody_is_asked_where_nothing_fits(plan_run: Any) -> None:
    run = plan_run("Approve", {"budget_usd": "0.01"})
    assert run["state"] == "failed"
    assert run["tasks"] == {"plan": "failed", "approve": "upstream_failed", "show": "upstream_failed"}
    assert run["asked"] == []
    assert "is the cheapest that fits; the budget is $0.01" in run["log"]
    assert "It would fit with a budget of $" in run["log"]
