# SPDX-License-Identifier: Apache-2.0
"""One demonstration a folder: a second one is refused and hurts nothing, a killed one is cleared up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from backends.processes import wait_for
from deepspeed_provider.errors import EngineError
from deepspeed_provider.local.demo import DemoSettings, only_session, run_demo, stop_leftovers
from deepspeed_provider.local.processes import ProcessRecord, free_port, start_group
from deepspeed_provider.local.services import Service, mlflow_service
from rich.console import Console

DAGS = Path(__file__).parents[2] / "dags"
SLEEP = (sys.executable, "-c", "import time; time.sleep(300)")
# Takes the lock, starts something in MLflow's place, and says when it has.
SESSION = """
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path
from deepspeed_provider.local.demo import only_session
from deepspeed_provider.local.processes import start_group
home = Path(sys.argv[1])
with only_session(home):
    (home / "mlflow").mkdir()
    _, record = start_group(sys.argv[2:], environment=os.environ, folder=home, log_path=home / "log")
    (home / "mlflow" / "MLflow.json").write_text(json.dumps(asdict(record)))
    print(json.dumps(asdict(record)), flush=True)
    time.sleep(300)
"""


def service(folder: Path) -> Service:
    return Service(name="Sleeper", command=SLEEP, port=free_port(), folder=folder, environment={}, health_path="/")


@pytest.fixture
def session(tmp_path):
    """Another process that holds the folder; (the process, the record of its service)."""
    other = subprocess.Popen([sys.executable, "-c", SESSION, tmp_path, *SLEEP], stdout=subprocess.PIPE, text=True)
    record = ProcessRecord(**json.loads(other.stdout.readline()))
    yield other, record
    other.kill()
    other.wait()
    mlflow_service(tmp_path, free_port()).stop_leftover()


def demo_settings(home: Path, dags: Path = DAGS) -> DemoSettings:
    return DemoSettings(home=home, dags_folder=dags, airflow_port=free_port(), mlflow_port=free_port())


def test_a_second_session_is_refused_and_the_first_goes_on(tmp_path, session):
    other, record = session
    with pytest.raises(EngineError, match=r"Another demonstration is running from .*Ctrl-C.*--home"):
        run_demo(demo_settings(tmp_path), Console(), once=True)
    assert record.alive
    assert other.poll() is None


def test_a_mistyped_folder_stops_nothing(tmp_path, session):
    _, record = session
    with pytest.raises(EngineError, match="There are no DAG files in"):
        run_demo(demo_settings(tmp_path, tmp_path / "gads"), Console(), once=True)
    assert record.alive


def test_what_a_killed_session_left_is_cleared_up(tmp_path, session):
    other, record = session
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert record.alive
    with only_session(tmp_path):
        stop_leftovers(demo_settings(tmp_path))
    assert not record.alive


def test_a_session_that_has_ended_leaves_the_folder_to_the_next(tmp_path):
    for _ in range(2):
        with only_session(tmp_path):
            pass


def test_a_service_stops_what_it_started_and_nothing_of_another(tmp_path):
    first, second = service(tmp_path), service(tmp_path)
    first.start()
    started = first.running()
    # Another session's, on record in the same place.
    _, others = start_group(SLEEP, environment={}, folder=tmp_path, log_path=tmp_path / "log")
    (tmp_path / "Sleeper.json").write_text(json.dumps(asdict(others)))
    first.stop()
    wait_for(lambda: not started.alive, 5, "its own process has ended")
    assert others.alive
    assert second.running() == others, "found by its record"
    second.stop()
    assert others.alive
    second.start()
    assert not others.alive, "a start makes room for itself"
    second.stop()
    assert second.running() is None
    assert not (tmp_path / "Sleeper.json").exists()
