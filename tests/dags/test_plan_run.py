# SPDX-License-Identifier: Apache-2.0
"""dags/plan.py under ``dag.test()``, with a person who answers through Airflow's own REST API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dags.airflow_home import TELL, AirflowHome

RUN = """
import json, sys, threading
from airflow.api_fastapi.app import create_app
from airflow.dag_processing.dagbag import DagBag
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
"""
FOUND = """
found = {"state": str(run.state), "tasks": tasks, "xcoms": xcoms, "asked": asked}
print("FOUND" + json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def plan_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the DAG in an Airflow of its own, gives the answer, and returns what became of it."""
    airflow = AirflowHome(tmp_path_factory.mktemp("plan-run"), AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS="True")

    def run(choice: str, conf: dict[str, Any]) -> dict[str, Any]:
        return airflow.run(RUN + TELL + FOUND, choice, json.dumps(conf), timeout_seconds=240)

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
