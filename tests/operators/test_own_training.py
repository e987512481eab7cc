# SPDX-License-Identifier: Apache-2.0
"""Users' own scripts and functions: what is sent for them, what comes back, and what is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from airflow.sdk.exceptions import AirflowFailException
from deepspeed_provider.local.engine import EmbeddedEngine
from deepspeed_provider.operators.own_training import DeepSpeedFunctionOperator, DeepSpeedScriptOperator
from deepspeed_provider.testing.executing import ExecutingWorkspace
from deepspeed_provider.testing.workspace import FakeWorkspace

from operators.fake_task import FakeTask

VOLUME = "/Volumes/main/default/runs"
CLUSTER = {"spark_version": "16.4.x-gpu-ml-scala2.12", "node_type_id": "g5.xlarge", "num_workers": 0}
SAME_PYTHON = next(
    version
    for version, python in [("15.4.x-gpu-ml-scala2.12", (3, 11)), ("16.4.x-gpu-ml-scala2.12", (3, 12))]
    if sys.version_info[:2] == python
)
LOCK = threading.Lock()
CONFIG = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
SCRIPT = """
import argparse, json, os
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--deepspeed", action="store_true")
parser.add_argument("--deepspeed_config")
found = parser.parse_args()
if os.environ["RANK"] == "0":
    with open(os.environ["DEEPSPEED_PROVIDER_RESULT"], "w") as file:
        ranks = int(os.environ["WORLD_SIZE"])
        json.dump({"epochs": found.epochs, "ranks": ranks, "config": json.load(open(found.deepspeed_config))}, file)
"""


def operator_of(kind: type = DeepSpeedScriptOperator, **options: Any) -> Any:
    given = {"databricks_conn_id": "databricks_default", "base_uri": VOLUME, "job": {"cluster": CLUSTER}, **options}
    return kind(task_id="train", poll_interval=0.2, **given)


def execute(operator: Any) -> dict[str, Any]:
    """What comes back, but for what the run cost."""
    found = operator.execute(FakeTask(try_number=1).context())
    return {name: value for name, value in found.items() if name not in ("billed_seconds", "cost_usd")}


@pytest.fixture(autouse=True)
def no_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Any:
    """Address of a repository that is served as plain files, with the script on its branch main."""
    folder = tmp_path / "repository"
    (folder / "training").mkdir(parents=True)
    (folder / "training" / "train.py").write_text(SCRIPT)
    identity = ["-c", "user.name=me", "-c", "user.email=me@example.com", "-c", "init.defaultBranch=main"]
    for words in (["init"], ["add", "."], ["commit", "-m", "first"], ["update-server-info"]):
        subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, check=True)
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/.git"
        server.shutdown()


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where each run leaves what rank 0 returned, as the driver side does."""

    def leave(run: Any, task_key: str, attempt: Any) -> None:
        place = run.task(task_key)["spark_python_task"]["parameters"][0]
        token = json.loads(workspace.files.contents[place])["token"]
        kept = {"token": token, "value": {"token": token, "returned": {"loss": 2.5}}}
        workspace.files.write(place.replace("request.json", "returned.json"), json.dumps(kept).encode())

    with FakeWorkspace(poll_s=3600, ended=leave) as workspace:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", workspace.connection_json)
        yield workspace


def sent(workspace: FakeWorkspace) -> tuple[dict[str, Any], set[str]]:
    """(request of the last run, names in the archive that lies there)."""
    place = workspace.runs[-1].tasks[0]["spark_python_task"]["parameters"][0]
    archives = [data for path, data in workspace.files.contents.items() if path.endswith(".zip")]
    names = zipfile.ZipFile(io.BytesIO(archives[-1])).namelist()
    return json.loads(workspace.files.contents[place]), set(names)


def test_a_local_script_travels_with_its_code_and_its_arguments_as_texts(
    workspace: FakeWorkspace, script: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").write_text("")
    operator = operator_of(
        script=script,
        code=[str(tmp_path / "mine")],
        arguments=["--epochs", 3, "--rate", 1e-5, True],
        deepspeed_config=json.dumps(CONFIG),
        environment={"NCCL_DEBUG": "INFO", "RETRIES": 3},
        gpus_per_node=2,
        job={"cluster": {**CLUSTER, "node_type_id": "g5.12xlarge"}},
    )
    assert execute(operator) == {"loss": 2.5}
    request, names = sent(workspace)
    assert {"train.py", "mine/model.py", "deepspeed_provider/training/own_code.py"} <= names
    assert request["payload"]["arguments"] == ["--epochs", "3", "--rate", "1e-05", "True"]
    assert request["payload"]["deepspeed_config"] == request["deepspeed_config"] == CONFIG
    assert request["environment"] == {"NCCL_DEBUG": "INFO", "RETRIES": "3"}
    assert (request["gpus_per_node"], request["payload"]["world_size"]) == (2, 2)


@pytest.mark.parametrize(
    ("given", "uri"),
    [
        ("/Workspace/Users/me@example.com/repo/train.py", "/Workspace/Users/me@example.com/repo/train.py"),
        ("/Volumes/main/default/code/train.py", "/Volumes/main/default/code/train.py"),
        ("dbfs:/Volumes/main/default/code/train.py", "/Volumes/main/default/code/train.py"),
        ("dbfs:/code/train.py", "dbfs:/code/train.py"),
    ],
)
def test_a_script_of_the_workspace_stays_there(workspace: FakeWorkspace, given: str, uri: str) -> None:
    execute(operator_of(script=given))
    request, names = sent(workspace)
    assert request["payload"]["script"] == {"uri": uri}
    assert "train.py" not in names


def test_a_script_in_git_is_named_by_its_repository(workspace: FakeWorkspace) -> None:
    assert execute(operator_of(script="training/train.py", git_source=GIT)) == {"loss": 2.5}
    request, _ = sent(workspace)
    source = {"git_url": GIT["git_url"], "git_branch": "main"}
    assert request["payload"]["script"] == {"git": source, "path": "training/train.py"}


def test_a_changed_script_is_another_request(script: Path) -> None:
    def digest() -> str:
        return operator_of(script=script).build_request("", "out", None).digest

    before = digest()
    assert digest() == before
    script.write_text(f"{SCRIPT}\n# changed")
    assert digest() != before


def train(epochs: int) -> dict[str, int]:
    import os

    return {"epochs": epochs, "ranks": int(os.environ["WORLD_SIZE"])}


def test_a_function_travels_with_the_package_that_reads_it(workspace: FakeWorkspace) -> None:
    job = {"cluster": {**CLUSTER, "spark_version": SAME_PYTHON}}
    execute(operator_of(DeepSpeedFunctionOperator, function=train, arguments={"epochs": 3}, job=job))
    request, names = sent(workspace)
    assert "cloudpickle/cloudpickle.py" in names
    assert (
        request["python"] == request["payload"]["function"]["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    )


def test_the_runtimes_python_is_compared_before_anything_is_sent(
    workspace: FakeWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"cluster": {**CLUSTER, "spark_version": "14.3.x-gpu-ml-scala2.12"}}
    with pytest.raises(AirflowFailException, match=r"job.cluster.spark_version.* has Python 3\.10"):
        execute(operator_of(DeepSpeedFunctionOperator, function=train, arguments={"epochs": 3}, job=job))
    assert workspace.files.contents == {}
    assert workspace.runs == []


def test_a_function_by_name_needs_no_python(workspace: FakeWorkspace, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def train(epochs): return epochs")
    job = {"cluster": {**CLUSTER, "spark_version": "14.3.x-gpu-ml-scala2.12"}}
    execute(operator_of(DeepSpeedFunctionOperator, function="mine:train", code=[str(tmp_path / "mine.py")], job=job))
    request, names = sent(workspace)
    assert (request["python"], request["payload"]["function"]) == ("", {"name": "mine:train"})
    assert "mine.py" in names


def test_an_existing_cluster_is_used_or_told_about(workspace: FakeWorkspace, script: Path) -> None:
    job = {"existing_cluster_id": "mine"}
    with pytest.raises(AirflowFailException, match=r"job.existing_cluster_id = 'mine': cannot be used"):
        execute(operator_of(script=script, job=job))
    assert workspace.runs == []
    workspace.clusters.add("mine")
    assert execute(operator_of(script=script, job=job)) == {"loss": 2.5}
    assert workspace.runs[-1].tasks[0]["existing_cluster_id"] == "mine"


GIT = {"git_url": "https://example.com/mine.git", "git_provider": "gitHub", "git_branch": "main"}
REFUSED = {
    "no such file": ({"script": "/nowhere/train.py"}, ["script = '/nowhere/train.py': is no Python file"]),
    "no Python": ({"script": __file__.replace(".py", ".sh")}, ["is no Python file"]),
    "object storage": ({"script": "s3://bucket/train.py"}, ["is no file for Python", "/Volumes"]),
    "the platform's Git": ({"job": {"run_fields": {"git_source": GIT}}}, ["job.run_fields.git_source", "the operator"]),
    "a file of this machine in Git": ({"git_source": GIT}, ["is no Python file in Git", "training/train.py"]),
    "no repository": ({"git_source": "https://example.com"}, ["git_source = 'https://example.com': is no mapping"]),
    "no address": ({"git_source": {}}, ["git_source.git_url = None: is no address for git", "https://"]),
    "keys": ({"git_source": {"git_url": "git@example.com:me/mine"}}, ["is no address for git"]),
    "a password in an address": ({"git_source": {"git_url": "https://me:pw@example.com/x"}}, ["(hidden)", "GIT_TOKEN"]),
    "two references": ({"git_source": {**GIT, "git_tag": "v1"}}, ["names git_branch and git_tag", "one of them"]),
    "half a commit": ({"git_source": {"git_url": GIT["git_url"], "git_commit": "abc"}}, ["is no whole commit", "40"]),
    "an option": ({"git_source": {**GIT, "git_branch": "--upload-pack=x"}}, ["is no name in Git"]),
    "a field": ({"git_source": {**GIT, "git_brunch": "x"}}, ["Did you mean 'git_branch'?"]),
    "no code": ({"code": ["/nowhere/mine"]}, ["code[0] = '/nowhere/mine': is not on this machine"]),
    "no cluster": ({"job": {"queue": False}}, ["job = {'queue': False}: names no cluster", "existing_cluster_id"]),
    "nothing": ({"arguments": ["--a", None]}, ["arguments[1] = None: is nothing", "Leave it out"]),
    "nested": ({"arguments": ["--a", [1, 2]]}, ["arguments[1] = [1, 2]: is a list, not one word"]),
    "one text": ({"arguments": "--a 1"}, ["arguments = '--a 1': is no list"]),
    "flags": ({"config_flags": "deepsped"}, ["Did you mean 'deepspeed'?"]),
    "configuration": ({"deepspeed_config": "[1]"}, ["deepspeed_config = '[1]': is no mapping"]),
    "batch": (
        {"deepspeed_config": {**CONFIG, "gradient_accumulation_steps": 7}},
        ["deepspeed_config.train_batch_size"],
    ),
    "ranks": ({"nodes": 0, "gpus_per_node": True}, ["nodes = 0: is no whole number", "gpus_per_node = True"]),
    "torchrun's": ({"environment": {"RANK": "3"}}, ["environment.RANK = '3': is torchrun's to set"]),
    "a variable of many": ({"environment": {"A": ["x"]}}, ["environment.A = ['x']: is no text"]),
    "a reference": ({"environment": {"HF_TOKEN": "{{secrets/s/k}}"}}, ["environment.HF_TOKEN", "spark_env_vars"]),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_sent(
    workspace: FakeWorkspace, script: Path, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(AirflowFailException) as caught:
        execute(operator_of(**{"script": script, **options}))
    assert [word for word in words if word not in str(caught.value)] == []
    assert workspace.requests == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"function": 5}, ["function = 5: is no function"], id="no function"),
        pytest.param({"function": "train"}, ["'module:function'"], id="no module"),
        pytest.param({"function": lambda: LOCK}, ["cannot be pickled"], id="refers to a lock"),
        pytest.param({"function": train, "arguments": {"a": {1}}}, ["arguments.a = {1}: travels as JSON"], id="a set"),
        pytest.param({"function": train, "arguments": [1]}, ["arguments = [1]: is no mapping"], id="no names"),
    ],
)
def test_functions_that_cannot_travel(workspace: FakeWorkspace, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(AirflowFailException) as caught:
        execute(operator_of(DeepSpeedFunctionOperator, **options))
    assert [word for word in words if word not in str(caught.value)] == []
    assert workspace.requests == []


def test_every_problem_is_told_at_once(workspace: FakeWorkspace) -> None:
    options = {"script": "none.py", "arguments": [None], "nodes": -1, "config_flags": "x", "environment": {"RANK": 1}}
    options["job"] = {"clustr": {}, "existing_cluster_id": "c"}
    with pytest.raises(AirflowFailException, match="6 problems"):
        execute(operator_of(**options))


@pytest.mark.slow
@pytest.mark.parametrize("gpus_per_node", [1, 2])
def test_all_really_run(
    tmp_path: Path, script: Path, repository: str, monkeypatch: pytest.MonkeyPatch, gpus_per_node: int
) -> None:
    with ExecutingWorkspace(tmp_path / "workspace") as executing:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", executing.connection_json)
        job = {"cluster": {**CLUSTER, "spark_version": SAME_PYTHON}}
        options = {"job": job, "use_gpu": False, "gpus_per_node": gpus_per_node}
        config = {"train_micro_batch_size_per_gpu": 2}
        found = execute(operator_of(script=script, arguments=["--epochs", 3], deepspeed_config=config, **options))
        assert found == {"epochs": 3, "ranks": gpus_per_node, "config": config}
        found = execute(operator_of(DeepSpeedFunctionOperator, function=train, arguments={"epochs": 4}, **options))
        assert found == {"epochs": 4, "ranks": gpus_per_node}
        in_git = {"script": "training/train.py", "git_source": {"git_url": repository, "git_branch": "main"}}
        found = execute(operator_of(arguments=["--epochs", 5], deepspeed_config=config, **in_git, **options))
        assert found == {"epochs": 5, "ranks": gpus_per_node, "config": config}


@pytest.mark.slow
def test_both_really_run_over_spark_connect(
    engine: EmbeddedEngine, tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = urlsplit(engine.ensure().url)
    connection = {"conn_type": "spark_connect", "host": server.hostname, "port": server.port}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_CONNECT_DEFAULT", json.dumps(connection))
    options = {
        "databricks_conn_id": None,
        "job": None,
        "base_uri": tmp_path.as_uri(),
        "use_gpu": False,
        "gpus_per_node": 2,
    }
    found = execute(operator_of(script=script, deepspeed_config={"train_micro_batch_size_per_gpu": 2}, **options))
    assert (found["epochs"], found["ranks"]) == (None, 2)
    found = execute(operator_of(DeepSpeedFunctionOperator, function=train, arguments={"epochs": 4}, **options))
    assert found == {"epochs": 4, "ranks": 2}


@pytest.mark.slow
def test_a_script_that_fails_tells_its_cause(tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script.write_text("raise ValueError('the data set is empty')")
    with ExecutingWorkspace(tmp_path / "workspace") as executing:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", executing.connection_json)
        with pytest.raises(Exception, match="on rank 0: ValueError: the data set is empty"):
            execute(operator_of(script=script, use_gpu=False))
