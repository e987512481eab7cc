from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from backends.processes import children_with, mentioning, wait_for
from deepspeed_provider.backends.spark_connect import SparkConnectBackend
from deepspeed_provider.errors import EngineError
from deepspeed_provider.local.engine import EmbeddedEngine, EngineSettings, default_home, ensure_engine
from deepspeed_provider.local.processes import free_port, require_free
from deepspeed_provider.local.worker_daemons import end_idle_daemons
from deepspeed_provider.training import cluster_calls


def test_the_home_is_a_folder_of_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPSPEED_PROVIDER_HOME", str(tmp_path / "state"))
    assert default_home() == tmp_path / "state"


def test_nothing_runs_from_an_empty_or_stale_folder(tmp_path):
    engine = EmbeddedEngine(tmp_path)
    assert engine.running() is None
    with pytest.raises(EngineError, match="deepspeed-provider engine start"):
        _ = engine.url
    engine.home.mkdir()
    stale = {"pid": os.getpid(), "created": 1.0, "port": 1, "ui_port": None, "home": str(engine.home), "ranks": 2}
    (engine.home / "engine.json").write_text(json.dumps(stale))
    assert engine.running() is None, "another process has that pid now"
    (engine.home / "engine.json").write_text("{ half a file")
    assert engine.running() is None


def test_a_port_in_use_is_one_clear_sentence():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=f"Port {port}, wanted by Spark Connect, is in use"):
            require_free(port, "Spark Connect")
    require_free(free_port(), "Spark Connect")


@pytest.mark.slow
def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(tmp_path):
    engine = EmbeddedEngine(tmp_path, EngineSettings(conf={"spark.master": "nonsense"}))
    with pytest.raises(EngineError, match=r"ended while starting \(exit status \d+\).*engine.log"):
        engine.ensure()
    assert engine.running() is None
    assert not mentioning(str(tmp_path))


@pytest.mark.slow
def test_one_engine_per_folder_found_by_others_and_stopped_without_leftovers(tmp_path):
    settings = EngineSettings(ranks=3, conf={"spark.hadoop.fs.s3a.secret.key": "hush", "spark.ui.retainedJobs": "7"})
    with ThreadPoolExecutor(3) as pool:
        infos = list(pool.map(lambda _: EmbeddedEngine(tmp_path, settings).ensure(), range(3)))
    assert len({info.pid for info in infos}) == 1, "three at once must share one engine"
    info = infos[0]
    assert os.getpgid(info.pid) == info.pid, "a process group of its own"
    script = (
        "import sys; from pathlib import Path; from deepspeed_provider.local.engine import ensure_engine; "
        "print(ensure_engine(Path(sys.argv[1])).pid)"
    )
    seen = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert int(seen.stdout) == info.pid
    with SparkConnectBackend(info.url).session() as spark:
        assert spark.range(10).count() == 10
    assert list(info.event_log_dir.iterdir()), "the event log is on"
    assert "Spark Connect server" in EmbeddedEngine(tmp_path).log_path.read_text()

    os.kill(info.pid, signal.SIGKILL)
    wait_for(lambda: EmbeddedEngine(tmp_path).running() is None, 10, "a killed engine is seen as gone")
    again = ensure_engine(tmp_path)
    assert again.pid != info.pid
    assert again.ranks == 3, "started anew as it was started before"
    assert "spark.ui.retainedJobs=7" in psutil.Process(again.pid).cmdline()
    assert not [path for path in tmp_path.rglob("*.json") if "hush" in path.read_text()], "no secret is written down"
    EmbeddedEngine(tmp_path).stop()
    assert EmbeddedEngine(tmp_path).running() is None
    assert not mentioning(str(tmp_path))


@pytest.mark.slow
def test_a_session_leaves_no_idle_daemon_for_ever_and_gets_another_at_need(engine):
    server = engine.running().pid

    with SparkConnectBackend(engine.url).session() as spark:
        cluster_calls.ship_code(spark)
        assert cluster_calls.call(spark, json.loads, "[1]") == [1]
        assert children_with(server, "pyspark.daemon")
        assert end_idle_daemons(server) == [], "they may be needed soon"

        def ended():
            end_idle_daemons(server, older_than_seconds=0)
            return not children_with(server, "pyspark.daemon")

        wait_for(ended, 20, "idle daemons end")
        assert cluster_calls.call(spark, json.loads, "[2]") == [2], "Spark starts another"
