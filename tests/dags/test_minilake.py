# SPDX-License-Identifier: Apache-2.0
"""The shipped DAG against a workspace that others wrote: minilake, which runs Python tasks as processes.

It shares no code and no reading of the API with our own fake. What it lacks of the real one is asserted too, so that a
release that has it is noticed.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from airflow.sdk.exceptions import AirflowFailException
from deepspeed_provider.local.jvm import classic_java_home, find_jvm
from deepspeed_provider.local.processes import free_port, start_group, stop_group
from deepspeed_provider.operators.dataset import PrepareDatasetOperator
from operators.fake_task import FakeTask
from training.tiny_runs import make_model

from dags.airflow_home import AirflowHome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

VERSION = Path(__file__).with_name("minilake.txt")
CLUSTER = {"spark_version": "16.4.x-gpu-ml-scala2.12", "node_type_id": "g5.xlarge", "num_workers": 0}
CODE_FOLDER = "/Workspace/Shared/fine-tunes/code"
# It runs a task with the python3 that it finds first, and has no mounts: this one finds workspace files where they lie.
PYTHON = """#!/bin/sh
for word do
  shift
  case "$word" in /Workspace/*) word="$MINILAKE_DATA_DIR/workspace$word" ;; esac
  set -- "$@" "$word"
done
exec {python} "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Minilake:
    """One that is running."""

    port: int

    @property
    def connection_json(self) -> str:
        fields = {"conn_type": "databricks", "host": "127.0.0.1", "schema": "http", "port": self.port, "password": "x"}
        return json.dumps(fields)

    def get(self, path: str, **query: Any) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}/api/{path}", params=query, timeout=60)

    def post(self, endpoint: str, **body: Any) -> dict[str, Any]:
        answer = httpx.post(f"http://127.0.0.1:{self.port}/api/{endpoint}", json=body, timeout=60).raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture(scope="module")
def minilake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minilake]:
    root = tmp_path_factory.mktemp("minilake")
    program = installed(root / "venv")
    tools = root / "tools"
    tools.mkdir()
    (tools / "python3").write_text(PYTHON.format(python=shlex.quote(sys.executable)))
    (tools / "python3").chmod(0o755)
    found = Minilake(port=free_port())
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "MINILAKE_DATA_DIR": str(root / "data"),
        "MINILAKE_JOB_EXECUTOR": "subprocess",
        "MINILAKE_NOTEBOOK": "0",
        "JAVA_HOME": str(classic_java_home(find_jvm(), root / "java")),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    log = root / "minilake.log"
    leader, _ = start_group(
        [str(program), "--port", str(found.port)], environment=environment, folder=root, log_path=log
    )
    try:
        wait_until_it_answers(found, log)
        yield found
    finally:
        stop_group(leader.pid, 10)
        leader.wait()


def installed(folder: Path) -> Path:
    """The program, in an environment of its own."""
    venv.create(folder, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    done = subprocess.run(
        [*pip, "--requirement", str(VERSION)], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"minilake cannot be installed: {done.stderr.strip()[-300:]}")
    return folder / "bin" / "minilake"


def wait_until_it_answers(minilake: Minilake, log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            minilake.get("2.1/clusters/spark-versions").raise_for_status()
            return
        except httpx.HTTPError:
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)


@pytest.fixture(scope="module")
def finished(minilake: Minilake, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One fine-tune through the shipped DAG."""
    home = tmp_path_factory.mktemp("dag-test")
    rows = [{"prompt": f"What is {n} plus one?", "completion": f"It is {n + 1}."} for n in range(200)]
    (home / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    airflow = AirflowHome(
        home,
        MLFLOW_TRACKING_URI=f"sqlite:///{home}/mlflow.db",
        AIRFLOW_CONN_DATABRICKS_DEFAULT=minilake.connection_json,
    )
    conf = {
        "model": str(make_model(home / "model")),
        "data": (home / "sums.jsonl").as_uri(),
        "max_steps": 12,
        "learning_rate": 1e-2,
        "sequence_length": 64,
        "evaluation_rows": 8,
        "generations": 1,
        "registered_model_name": "sums",
        "databricks_conn_id": "databricks_default",
        # It runs files of the workspace only, and programs here find no Volume of it.
        "base_uri": (home / "runs").as_uri(),
        "job": {"code_folder": CODE_FOLDER, "cluster": CLUSTER},
    }
    return airflow.run_dag("finetune", conf, timeout_seconds=1200)


def test_the_whole_way_to_the_registry(finished: dict[str, Any], minilake: Minilake) -> None:
    assert finished["state"] == "success", finished["log"][-6000:]
    assert set(finished["tasks"].values()) == {"success"}
    evaluation = finished["xcoms"]["evaluate"]["return_value"]["metrics"]
    assert evaluation["tuned_perplexity"] < evaluation["base_perplexity"]
    runs = minilake.get("2.2/jobs/runs/list").json()["runs"]
    assert sorted(run["run_name"].split()[1] for run in runs) == ["evaluate", "finetune", "prepare"]
    assert {run["state"]["result_state"] for run in runs} == {"SUCCESS"}


def test_what_it_does_not_tell(finished: dict[str, Any], minilake: Minilake) -> None:
    """So neither the cluster's logs nor a cost are known here, and a failure's cause comes from the output alone."""
    runs = minilake.get("2.2/jobs/runs/list").json()["runs"]
    for run in runs:
        assert run.get("status") is None
        assert [task.get("cluster_instance") for task in run["tasks"]] == [None]
    for task in ("prepare", "finetune", "evaluate"):
        assert finished["xcoms"][task]["_link_DatabricksRunLink"]
        assert not finished["xcoms"][task].get("_link_ClusterLogsLink")


@pytest.fixture
def operator(
    minilake: Minilake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., PrepareDatasetOperator]:
    monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", minilake.connection_json)

    def prepare(data: str, **job: Any) -> PrepareDatasetOperator:
        return PrepareDatasetOperator(
            task_id="prepare",
            spec={"model": "m", "data": data},
            databricks_conn_id="databricks_default",
            base_uri=tmp_path.as_uri(),
            job={"code_folder": CODE_FOLDER, **job},
            poll_interval=1,
        )

    return prepare


def test_a_failure_is_told_with_its_cause(operator: Callable[..., PrepareDatasetOperator]) -> None:
    with pytest.raises(
        AirflowFailException, match=r"USER: DatasetError: .*none\.jsonl': the cluster finds no such file"
    ):
        operator("file:///nowhere/none.jsonl", cluster=CLUSTER).execute(FakeTask(try_number=1).context())


def test_its_cancel_does_not_end_a_program(minilake: Minilake) -> None:
    """So here nothing can be said about what our cancel does."""
    path = "/Workspace/Shared/sleep.py"
    source = base64.b64encode(b"import time; time.sleep(5)").decode()
    minilake.post("2.0/workspace/import", path=path, format="AUTO", content=source, overwrite=True)
    task = {"task_key": "t", "spark_python_task": {"python_file": path}, "new_cluster": CLUSTER}
    run_id = minilake.post("2.2/jobs/runs/submit", tasks=[task])["run_id"]
    minilake.post("2.2/jobs/runs/cancel", run_id=run_id)
    run: dict[str, Any] = {"state": {}}
    while run["state"].get("result_state") is None:
        time.sleep(0.5)
        run = minilake.get("2.2/jobs/runs/get", run_id=run_id).json()
    assert run["end_time"] - run["start_time"] >= 5000


def test_it_has_no_cluster_to_choose(operator: Callable[..., PrepareDatasetOperator]) -> None:
    """Two machines without GPUs, and no runtime for machine learning."""
    with pytest.raises(AirflowFailException, match=r"none of the runtimes .*job=\{'existing_cluster_id'"):
        operator("file:///nowhere/none.jsonl").execute(FakeTask(try_number=1).context())
