# SPDX-License-Identifier: Apache-2.0
"""Users' scripts and functions in one rank: a process that has nothing but the archive that travels."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_provider.requested.own_function import function_place, pickler_code
from deepspeed_provider.training.code_archive import build_code_archive, training_code
from deepspeed_provider.training.git_checkout import credentials
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


def git(folder: Path, *words: str) -> str:
    by = ["-c", "user.name=me", "-c", "user.email=me@example.com", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *by, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Its url, and three commits: of a tag, of the head, and of a branch."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "--quiet")
    commits = {}
    for name in ("first", "second", "third"):
        (folder / "training").mkdir(exist_ok=True)
        (folder / "words.txt").write_text(name)
        (folder / "training" / "beside.py").write_text(f"NAME = {name!r}")
        (folder / "training" / "train.py").write_text(
            f"{TELL}\nimport beside; tell(name=beside.NAME, words=open('words.txt').read())"
        )
        if name == "third":
            git(folder, "checkout", "--quiet", "-b", "other/branch")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", name)
        commits[name] = git(folder, "rev-parse", "HEAD")
        if name == "first":
            git(folder, "tag", "-a", "v1", "-m", "annotated")
    git(folder, "checkout", "--quiet", "main")
    return {"url": folder.as_uri(), **commits}


SOURCES = {
    "head": ({}, "second"),
    "branch": ({"git_branch": "other/branch"}, "third"),
    "annotated tag": ({"git_tag": "v1"}, "first"),
    "commit": ({"git_commit": "first"}, "first"),
}


def in_git(repository: dict[str, str], path: str = "training/train.py", **reference: str) -> dict[str, Any]:
    if "git_commit" in reference:
        reference["git_commit"] = repository.get(reference["git_commit"], reference["git_commit"])
    source = {"git_url": repository["url"], **reference}
    shared = {"arguments": [], "deepspeed_config": None, "config_flags": "none"}
    return {"script": {"git": source, "path": path}, **shared}


@pytest.mark.parametrize(("reference", "name"), SOURCES.values(), ids=SOURCES)
def test_a_script_in_git_runs_at_its_commit_from_the_repositorys_root(
    ranks: Ranks, repository: dict[str, str], reference: dict[str, str], name: str
) -> None:
    found = ranks.run("run_script", in_git(repository, **reference))
    assert found is not None, ranks.text
    assert (found["returned"]["name"], found["returned"]["words"]) == (name, name)
    assert f"at commit {repository[name]}" in ranks.text


def test_a_branch_that_moves_is_one_commit_for_all_ranks(ranks: Ranks, repository: dict[str, str]) -> None:
    (ranks.folder / "out").mkdir()
    (ranks.folder / "out" / "git-commit").write_text(repository["first"])
    script = "training/train.py"
    assert ranks.run("run_script", in_git(repository, script, git_branch="main"), rank=1) is not None, ranks.text
    assert "at commit" not in ranks.text, "said once"
    ranks.run("run_script", in_git(repository, "none.py", git_branch="main"), rank=0)
    assert (ranks.folder / "out" / "git-commit").read_text() == repository["second"], "the first rank tells"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"git_branch": "none"}, "git_branch = 'none': there is nothing of this name", id="no branch"),
        pytest.param({"git_tag": "main"}, "git_tag = 'main': there is nothing of this name", id="a branch as a tag"),
        pytest.param({"git_commit": "0" * 40}, "git_source:", id="no commit"),
        pytest.param({"path": "none.py"}, "script = 'none.py': no such file in file://", id="no file"),
    ],
)
def test_what_is_not_in_git_is_a_users_error(
    ranks: Ranks, repository: dict[str, str], options: dict[str, str], words: str
) -> None:
    assert ranks.run("run_script", in_git(repository, **options)) is None
    assert ranks.failure["kind"] == "USER"
    assert words in ranks.failure["message"]


@pytest.mark.parametrize(
    ("url", "environment", "pair"),
    [
        ("https://example.com/me/mine.git", {"GIT_TOKEN": "t0k"}, "x-access-token:t0k"),
        ("https://example.com/me/mine.git", {"GIT_TOKEN": "t0k", "GIT_USERNAME": "oauth2"}, "oauth2:t0k"),
        ("https://example.com/me/mine.git", {}, None),
        ("http://example.com/me/mine.git", {"GIT_TOKEN": "t0k"}, None),
    ],
    ids=["token", "with a name", "public", "not encrypted"],
)
def test_a_token_goes_to_the_repositorys_host_only(url: str, environment: dict[str, str], pair: str | None) -> None:
    found = credentials(url, environment)
    if pair is None:
        assert found == {}
        return
    config = {"PATH": os.environ["PATH"], **found}
    asked = ["git", "config", "--get-urlmatch", "http.extraheader"]
    header = subprocess.run([*asked, url], env=config, capture_output=True, text=True, check=True).stdout.strip()
    assert base64.b64decode(header.removeprefix("Authorization: Basic ")).decode() == pair
    elsewhere = subprocess.run([*asked, "https://elsewhere.com/"], env=config, capture_output=True, check=False)
    assert elsewhere.stdout == b""


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
