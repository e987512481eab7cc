# SPDX-License-Identifier: Apache-2.0
"""What the driver of a cluster does with a request, and what it leaves for Airflow."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed_provider.backends import jobs_evidence
from deepspeed_provider.training import driver_side
from deepspeed_provider.training.failures import InputError

REQUEST: dict[str, Any] = {
    "token": "t",
    "entry": "m:f",
    "payload": {"epochs": 3},
    "nodes": 1,
    "gpus_per_node": 2,
    "use_gpu": False,
    "deepspeed_config": {"train_batch_size": 2},
    "environment": {},
}


class Distributor:
    """Notes how it was made, and returns what rank 0 would."""

    made: dict[str, Any]

    def __init__(self, **settings: Any) -> None:
        Distributor.made = settings

    def run(self, rank: Any, payload: str) -> str:
        return json.dumps({"ranks": "ran", "payload": json.loads(payload)})


@pytest.fixture
def distributor(monkeypatch: pytest.MonkeyPatch) -> type[Distributor]:
    name = "pyspark.ml.deepspeed.deepspeed_distributor"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(DeepspeedTorchDistributor=Distributor))
    session = SimpleNamespace(builder=SimpleNamespace(getOrCreate=lambda: None))
    monkeypatch.setitem(sys.modules, "pyspark.sql", SimpleNamespace(SparkSession=session))
    return Distributor


@pytest.mark.parametrize(("nodes", "local"), [(1, True), (2, False), (8, False)])
def test_one_node_trains_on_the_driver_and_several_on_workers(
    distributor: type[Distributor], nodes: int, local: bool
) -> None:
    returned = driver_side.start({**REQUEST, "nodes": nodes}, "code.zip")
    assert returned == {"ranks": "ran", "payload": {"epochs": 3}}
    assert distributor.made == {
        "numGpus": 2,
        "nnodes": nodes,
        "localMode": local,
        "useGpu": False,
        "deepspeedConfig": {"train_batch_size": 2},
    }


def test_work_on_the_driver_starts_no_ranks(distributor: type[Distributor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pyspark.ml.deepspeed.deepspeed_distributor")
    Distributor.made = {}
    request = {**REQUEST, "on_driver": True, "entry": "operator:itemgetter", "payload": 1}
    with pytest.raises(TypeError, match="not JSON serializable"):
        driver_side.start(request, "code.zip")
    assert driver_side.start({**request, "entry": "json:dumps", "payload": {"a": 1}}, "code.zip") == '{"a": 1}'
    assert Distributor.made == {}


@pytest.mark.parametrize(
    ("asked", "found", "refused"),
    [
        pytest.param({"gpus_per_node": 4}, 4, False, id="as planned"),
        pytest.param({"gpus_per_node": 4}, 2, True, id="fewer"),
        pytest.param({"gpus_per_node": 4}, 8, True, id="more"),
        pytest.param({"gpus_per_node": 4, "nodes": 2}, 0, False, id="of several nodes the driver's stay idle"),
        pytest.param({"use_gpu": False}, 0, False, id="no GPUs wanted"),
    ],
)
def test_the_drivers_gpus_are_counted(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], found: int, refused: bool
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: found)))
    request = {**REQUEST, "use_gpu": True, **asked}
    if not refused:
        driver_side.require_hardware(request)
        return
    with pytest.raises(InputError, match=f"gpus_per_node = 4 in the plan, but the driver has {found}"):
        driver_side.require_hardware(request)


def folder_of(tmp_path: Path, readable: bool) -> str:
    """Below a file no folder can be."""
    (tmp_path / "file").write_text("")
    return str(tmp_path / ("run" if readable else "file/run"))


def main(tmp_path: Path, readable: bool = True, **fields: Any) -> str:
    """Runs a request; the folder it leaves its files in."""
    folder = folder_of(tmp_path, readable)
    (tmp_path / "request.json").write_text(json.dumps({**REQUEST, "output_uri": folder, **fields}))
    driver_side.main(str(tmp_path / "request.json"), "code.zip")
    return folder


@pytest.mark.parametrize("readable", [True, False], ids=["folder", "no folder"])
def test_a_result_is_marked_in_the_output_and_kept_where_files_can_be(
    distributor: type[Distributor], tmp_path: Path, capsys: pytest.CaptureFixture[str], readable: bool
) -> None:
    folder = main(tmp_path, readable)
    kept = {"token": "t", "value": {"ranks": "ran", "payload": {"epochs": 3}}}
    assert jobs_evidence.marked(capsys.readouterr().out, driver_side.RESULT_MARK) == [kept]
    assert (json.loads(Path(folder, driver_side.RETURNED).read_text()) == kept) if readable else True


@pytest.mark.parametrize(
    ("written", "error", "told"),
    [
        pytest.param({1: "GPU_OOM"}, RuntimeError("rank 1"), ["GPU_OOM"], id="what a rank wrote"),
        pytest.param({0: "TRANSIENT", 1: "USER"}, RuntimeError("x"), ["TRANSIENT", "USER"], id="of every rank"),
        pytest.param({1: "GPU_OOM"}, InputError("no"), ["GPU_OOM"], id="ranks know better"),
        pytest.param({}, InputError("gpus_per_node = 4"), ["USER"], id="the driver's own"),
        pytest.param({}, RuntimeError("x"), [], id="nothing is known"),
        pytest.param(None, InputError("gpus_per_node = 4"), ["USER"], id="no readable folder"),
        pytest.param(None, RuntimeError("x"), [], id="no readable folder, and nothing is known"),
    ],
)
def test_failures_are_marked_in_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: dict[int, str] | None, error: Exception, told: Any
) -> None:
    folder = folder_of(tmp_path, written is not None)
    for rank, kind in (written or {}).items():
        Path(folder).mkdir(exist_ok=True)
        Path(folder, f"failure-rank{rank}.json").write_text(json.dumps({"kind": kind}))
    driver_side.tell_failure({**REQUEST, "output_uri": folder}, error)
    found = jobs_evidence.marked(capsys.readouterr().out, driver_side.FAILURE_MARK)
    assert [record["kind"] for record in found] == told


@pytest.mark.parametrize("uri", ["no-such-scheme://bucket/run", "file:///nowhere/run"])
def test_storage_that_cannot_be_read_does_not_hide_the_failure(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    driver_side.tell_failure({**REQUEST, "output_uri": uri}, InputError("Plan again."))
    assert "Plan again." in capsys.readouterr().out


def test_a_pickle_of_another_python_starts_no_rank(
    distributor: type[Distributor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Distributor.made = {}
    with pytest.raises(InputError, match=r"pickled by Python 3\.1,"):
        main(tmp_path, python="3.1")
    assert Distributor.made == {}
    assert driver_side.FAILURE_MARK in capsys.readouterr().out


@pytest.mark.parametrize(("rank", "local_rank", "returns"), [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False)])
def test_one_rank_of_each_machine_returns(
    monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, returns: bool
) -> None:
    """They share a file for it, in which rank 0's word must stand."""
    for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "PYTHONPATH": ""}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "path", list(sys.path))
    run_rank = driver_side.rank_function("operator:neg", "code.zip", {})
    if returns:
        assert run_rank("5") == "-5"
        return
    with pytest.raises(SystemExit) as end:
        run_rank("5")
    assert end.value.code == 0


AS_SCRIPT = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
AS_TEXT = "import sys; sys.argv = sys.argv[1:]; exec(compile(open(sys.argv[0]).read(), sys.argv[0], 'exec'), {})"


@pytest.mark.parametrize("way", [AS_SCRIPT, AS_TEXT], ids=["run as a script", "run as a text"])
def test_the_tasks_file_finds_the_code_beside_it(tmp_path: Path, way: str) -> None:
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        for package in ("deepspeed_provider", "deepspeed_provider/training"):
            archive.writestr(f"{package}/__init__.py", "")
        archive.writestr("deepspeed_provider/training/driver_side.py", "def main(*words): print(words)")
    (tmp_path / "launch.py").write_text(driver_side.launch_script("code.zip"))
    words = [sys.executable, "-I", "-c", way, str(tmp_path / "launch.py"), "request.json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30, cwd="/")
    assert done.stdout.strip() == str(("request.json", str(tmp_path / "code.zip")))
