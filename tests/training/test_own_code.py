# SPDX-License-Identifier: Apache-2.0
"""Users' scripts and functions in one rank: a process that has nothing but the archive that travels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_provider.requested.own_function import function_place, pickler_code
from deepspeed_provider.training.code_archive import build_code_archive, training_code
from deepspeed_provider.training.own_code import CONFIG_FLAGS

RANK = """
import json, sys
archive, entry, payload, target = sys.argv[1:]
sys.path.insert(0, archive)
from deepspeed_provider.training import own_code
returned = getattr(own_code, entry)(json.loads(payload))
with open(target, "w") as file:
    json.dump(returned, file)
"""
TELL = """
import json, os, sys
def tell(**found):
    with open(os.environ["DEEPSPEED_PROVIDER_RESULT"], "w") as file:
        json.dump({"name": __name__, "words": sys.argv[1:], **found}, file)
"""
PLAIN = f"""
{TELL}
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
tell(epochs=parser.parse_args().epochs, config=json.load(open(os.environ["DEEPSPEED_PROVIDER_CONFIG"])))
"""
DEEPSPEED = f"""
{TELL}
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--deepspeed", action="store_true")
parser.add_argument("--deepspeed_config")
found = parser.parse_args()
assert found.deepspeed
tell(epochs=found.epochs, config=json.load(open(found.deepspeed_config)))
"""
HUGGING_FACE = f"""
{TELL}
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--deepspeed")
found = parser.parse_args()
tell(epochs=found.epochs, config=json.load(open(found.deepspeed)))
"""
CONFIG = {"train_batch_size": 4}


class Ranks:
    """Starts one rank of two, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, entry: str, payload: dict[str, Any], *code: str, rank: int = 0, world_size: int = 2) -> Any:
        archive = build_code_archive((*training_code(), *code), self.folder)
        shared = {"token": "t", "output_uri": str(self.folder / "out"), "world_size": 2, "use_gpu": False}
        returned = self.folder / "returned"
        done = subprocess.run(
            [sys.executable, "-I", "-c", RANK, str(archive), entry, json.dumps({**shared, **payload}), str(returned)],
            env={"PATH": os.environ["PATH"], "RANK": str(rank), "WORLD_SIZE": str(world_size)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.text = done.stdout + done.stderr
        return json.loads(returned.read_text()) if done.returncode == 0 else None

    def script(self, text: str, *arguments: str, flags: str = "deepspeed", config: Any = None, **options: Any) -> Any:
        path = self.folder / "train.py"
        path.write_text(text)
        payload = {"arguments": arguments, "deepspeed_config": config, "config_flags": flags}
        return self.run("run_script", {"script": {"shipped": "train.py"}, **payload}, str(path), **options)

    def function(self, function: Any, *code: str, **arguments: Any) -> Any:
        problems: list[Any] = []
        payload = {"function": function_place(function, problems), "arguments": arguments}
        assert problems == []
        return self.run("call_function", payload, *pickler_code(), *code)

    @property
    def failure(self) -> dict[str, Any]:
        return json.loads((self.folder / "out" / "failure-rank0.json").read_text())


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        pytest.param(PLAIN, "none", id="knows no flags"),
        pytest.param(DEEPSPEED, "deepspeed", id="DeepSpeed's own"),
        pytest.param(HUGGING_FACE, "hf", id="Hugging Face's"),
    ],
)
def test_a_script_gets_its_arguments_and_the_configuration(ranks: Ranks, script: str, flags: str) -> None:
    found = ranks.script(script, "--epochs", "3", flags=flags, config=CONFIG)
    assert found is not None, ranks.text
    assert found["token"] == "t"
    told = found["returned"]
    assert (told["name"], told["epochs"], told["config"]) == ("__main__", 3, CONFIG)


def test_the_flags_of_deepspeed_are_those_that_the_distributor_appends() -> None:
    from pyspark.ml.deepspeed.deepspeed_distributor import DeepspeedTorchDistributor

    asked = {"local_mode": True, "num_processes": 1, "deepspeed_config": "FILE"}
    command = DeepspeedTorchDistributor._create_torchrun_command(asked, "train.py")
    assert command[command.index("train.py") + 1 :] == [word.format(file="FILE") for word in CONFIG_FLAGS["deepspeed"]]


def test_without_a_configuration_no_flag_is_added(ranks: Ranks) -> None:
    assert ranks.script(f"{TELL}\ntell()", "a b")["returned"]["words"] == ["a b"]


@pytest.mark.parametrize("text", ["print(1)", "import sys; sys.exit()", "raise SystemExit(0)"])
def test_a_script_that_leaves_nothing_returns_its_status(ranks: Ranks, text: str) -> None:
    assert ranks.script(text) == {"token": "t", "returned": {"exit_status": 0}}


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        pytest.param("1 / 0", "UNKNOWN", "division by zero", id="raises"),
        pytest.param("raise SystemExit(7)", "UNKNOWN", "train.py ended with status 7", id="another status"),
        pytest.param(PLAIN, "USER", "config_flags says by which flags", id="flags that it does not know"),
        pytest.param("import no_such_library", "USER", "no_such_library", id="a library that is not there"),
        pytest.param("raise MemoryError", "HOST_OOM", "MemoryError", id="out of memory"),
    ],
)
def test_a_script_that_fails_leaves_its_cause(ranks: Ranks, text: str, kind: str, words: str) -> None:
    assert ranks.script(text, config=CONFIG) is None
    assert ranks.failure["kind"] == kind
    assert words in ranks.failure["message"]


def test_a_script_of_the_clusters_finds_modules_beside_it(ranks: Ranks, tmp_path: Path) -> None:
    place = tmp_path / "Workspace"
    place.mkdir()
    (place / "beside.py").write_text("VALUE = 5")
    (place / "train.py").write_text(f"{TELL}\nimport beside; tell(value=beside.VALUE)")
    payload = {"arguments": [], "deepspeed_config": None, "config_flags": "none"}
    found = ranks.run("run_script", {"script": {"uri": str(place / "train.py")}, **payload})
    assert found["returned"]["value"] == 5
    ranks.folder = tmp_path / "other"
    ranks.folder.mkdir()
    assert ranks.run("run_script", {"script": {"uri": "/Workspace/none.py"}, **payload}) is None
    assert "script = '/Workspace/none.py': no such file" in ranks.failure["message"]


def test_a_second_start_runs_nothing(ranks: Ranks) -> None:
    script = "import pathlib; pathlib.Path('ran').open('a').write('x')"
    assert ranks.script(script) is not None
    assert ranks.script(script) is None
    assert "second start" in ranks.failure["message"]
    assert (ranks.folder / "ran").read_text() == "x"


def test_other_ranks_return_nothing_of_their_own(ranks: Ranks) -> None:
    assert ranks.script(f"{TELL}\ntell()", rank=1) == {"token": "t", "returned": None}


def test_fewer_ranks_than_asked_for_are_refused(ranks: Ranks) -> None:
    assert ranks.script("print(1)", world_size=1) is None
    assert "ask for 2 ranks, but 1 were started" in ranks.failure["message"]


RATE = 0.5


def halved(value: float) -> float:
    return value * RATE


def test_a_function_travels_with_what_it_refers_to_in_its_module(ranks: Ranks) -> None:
    def train(steps: int, losses: list[float]) -> dict[str, Any]:
        import os

        return {"steps": steps, "loss": halved(min(losses)), "rank": os.environ["RANK"]}

    found = ranks.function(train, steps=2, losses=[3.0, 1.0])
    assert found is not None, ranks.text
    assert found["returned"] == {"steps": 2, "loss": 0.5, "rank": "0"}


def test_a_function_by_name_comes_from_the_code(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def train(steps):\n    return steps + 1\n")
    assert ranks.function("mine:train", str(tmp_path / "mine.py"), steps=1)["returned"] == 2


def test_what_is_no_json_is_refused_where_it_was_made(ranks: Ranks) -> None:
    assert ranks.function(lambda: {1, 2}) is None
    assert (ranks.failure["kind"], "Return numbers and texts" in ranks.failure["message"]) == ("USER", True)


def test_a_function_of_another_python_is_not_read(ranks: Ranks) -> None:
    given = {"pickled": "bm8gcGlja2xl", "python": "3.1"}
    assert ranks.run("call_function", {"function": given, "arguments": {}}) is None
    assert "pickled by Python 3.1" in ranks.failure["message"]
