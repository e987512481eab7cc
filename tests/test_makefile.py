# SPDX-License-Identifier: Apache-2.0
"""What ``make`` refuses, in one sentence and before it has changed anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed_provider.local.demo import only_session

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "demo-model.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-C", checkout, *words], capture_output=True, text=True, timeout=60)


def python_of(version: str, path: Path) -> Path:
    """An interpreter that takes itself for another version."""
    numbers = tuple(map(int, version.split(".")))
    path.write_text(
        f"#!/bin/sh\n[ $1 = -V ] && echo Python {version} && exit\n"
        f'exec {sys.executable} -c "import sys; sys.version_info = {numbers}; exec(sys.argv[1])" "$2"\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("version", ["3.10.14", "3.13.1", "3.14.0"])
def test_a_python_that_the_constraints_do_not_know_is_refused(checkout: Path, version: str) -> None:
    python = python_of(version, checkout / "python")
    done = make(checkout, "setup", f"PYTHON={python}")
    assert done.returncode != 0
    said = f"Python 3.11 or 3.12 is needed, but {python} is Python {version}: name another one with make PYTHON="
    assert said in done.stdout
    assert not (checkout / ".venv").exists()


def test_a_python_that_is_not_there_is_named(checkout: Path) -> None:
    done = make(checkout, "setup", "PYTHON=no-such-python")
    assert done.returncode != 0
    assert "There is no Python 'no-such-python': install Python 3.11 or 3.12" in done.stdout


def test_the_state_of_a_running_demonstration_is_not_removed(checkout: Path) -> None:
    home = checkout / ".deepspeed"
    home.mkdir()
    with only_session(home):
        done = make(checkout, "clean")
        assert done.returncode != 0
        assert "A demonstration is running from .deepspeed: end it with Ctrl-C" in done.stdout
        assert home.exists()
    assert make(checkout, "clean").returncode == 0
    assert not home.exists()
