"""Submitters killed with signal 9 at random points: exactly one run each, its result arrives.

Runs are counted from the server's event log and from a line that each rank appends to a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deepspeed_provider.backends.base import BackendUnavailable, RunIdentity, RunState
from deepspeed_provider.backends.spark_connect import SparkConnectBackend
from deepspeed_provider.local.engine import EmbeddedEngine, EngineSettings

from backends.cases import spark_connect_case
from backends.processes import alive, mentioning, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SUBMITTER = Path(__file__).with_name("submitter.py")

# Where to aim: (phase line to wait for, longest random delay after it in seconds). Submitting and
# running take about that long on two busy cores.
AIMS = (("started", 0.3), ("submitting", 2.0), ("submitting", 0.6), ("submitted", 0.5), ("polling", 4.0))
PHASES = [[name] for name in ("started", "submitting", "submitted", "polling", "result")]
RUNS = 8
KILLS_PER_RUN = 8
RUN_SECONDS = 12
SEED = 20261130


def job_of(case, request, generation=1):
    return {
        "backend": case.name,
        "address": case.address,
        "key": request.payload["name"],
        "generation": generation,
        "request": dataclasses.asdict(request),
    }


class Submitter:
    """One forked submitter. Its output ends when it does."""

    def __init__(self, pid, output):
        self._pid, self._output = pid, output

    def lines(self):
        with self._output.open() as stream:
            yield from (line.strip() for line in stream)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


@pytest.fixture
def fork_submitter(tmp_path):
    """Starts submitters from one process that has imported Spark already."""
    server = subprocess.Popen([sys.executable, SUBMITTER, "serve"], stdin=-1, stdout=-1, text=True)
    assert server.stdout.readline() == "serving\n"
    one_at_a_time = threading.Lock()

    def start(job):
        output = tmp_path / f"output-{uuid.uuid4().hex}"
        os.mkfifo(output)
        with one_at_a_time:
            print(json.dumps({**job, "output": str(output)}), file=server.stdin, flush=True)
            return Submitter(int(server.stdout.readline()), output)

    yield start
    server.stdin.close()
    server.wait(10)


def kill_at(submitter, phase, delay):
    """Kills after ``delay`` seconds in ``phase``; returns the phase it was really killed in."""
    reached = threading.Event()
    lines = []

    def read():
        for line in submitter.lines():
            if line.split()[:1] not in PHASES:
                continue  # of a log
            lines.append(line)
            if line.startswith(phase):
                reached.set()
        reached.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reached.wait(60)
    time.sleep(delay)
    submitter.kill()
    reader.join(10)
    return (lines or ["nothing"])[-1].split()[0]


def test_at_least_fifty_random_kill_points_leave_exactly_one_run_each(case, fork_submitter):

    def one(index):
        rng = random.Random(SEED + index)
        request, marks = case.request(seconds=RUN_SECONDS)
        phases = []
        for kill in range(KILLS_PER_RUN):
            phase, longest = AIMS[(index + kill) % len(AIMS)]
            phases.append(kill_at(fork_submitter(job_of(case, request)), phase, rng.uniform(0, longest)))
        *_, last_line = fork_submitter(job_of(case, request)).lines()
        handle = case.connect().mint(request, case.identity(request))
        return request, marks, handle, phases, last_line

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(one, range(RUNS)))

    # A submitter that had its result already was not killed in the middle of anything.
    killed_in = [phase for *_, phases, _ in outcomes for phase in phases if phase != "result"]
    assert len(killed_in) >= 50
    counted = {phase: killed_in.count(phase) for phase in sorted(set(killed_in))}
    print(f"\nkilled in phase: {counted}")
    assert {"submitting", "polling"} <= set(killed_in), counted
    for request, marks, handle, phases, last_line in outcomes:
        name = request.payload["name"]
        assert last_line == f"result {json.dumps({'name': name, 'world_size': 2})}", phases
        assert marks.ranks() == [0, 1], (phases, "each rank started exactly once")
        assert case.count_runs(handle) == 1, phases
        wait_for(lambda marks=marks: not alive(marks.pids()), 15, "no rank survives its run")


@pytest.fixture
def own_engine(tmp_path):
    """An engine that a test may kill; a short detached time-out where it asks for one."""
    engines = []

    def start(**conf):
        engine = EmbeddedEngine(tmp_path / "home", EngineSettings(ranks=2, ui_port=None, conf=conf))
        engine.ensure()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()


def test_a_killed_server_takes_its_ranks_along_and_the_next_generation_runs(tmp_path, own_engine):
    engine = own_engine()
    case = spark_connect_case(engine, tmp_path)
    request, marks = case.request(seconds=300)
    backend = case.connect()
    handle = backend.submit(request, backend.mint(request, case.identity(request)))
    wait_for(lambda: len(marks.pids()) == 2, 60, "both ranks started")
    server = engine.running()
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not alive(marks.pids()), 20, "the ranks of a killed server went away")
    name = request.payload["name"]
    wait_for(lambda: not mentioning(str(engine.home)), 20, "workers and torchrun agents went away too")
    assert engine.running() is None

    restarted = spark_connect_case(own_engine(), tmp_path)
    assert restarted.connect().poll(handle).state is RunState.LOST
    again, more_marks = dataclasses.replace(request, payload={**request.payload, "seconds": 0}), marks
    words = [sys.executable, SUBMITTER, json.dumps(job_of(restarted, again, generation=2))]
    output = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout
    assert output.strip().splitlines()[-1] == f"result {json.dumps({'name': name, 'world_size': 2})}"
    assert more_marks.ranks() == [0, 0, 1, 1], "one run for each generation"
    second = restarted.connect().mint(again, RunIdentity(key=name, generation=2, digest=again.digest))
    assert [restarted.count_runs(each) for each in (handle, second)] == [1, 1]


def test_a_run_longer_than_the_detached_timeout_lives_while_it_is_polled(tmp_path, own_engine, caplog):
    """Also where the ranks hold every task slot, so that nobody can read how far they are."""
    engine = own_engine(
        **{
            "spark.master": "local[2]",
            "spark.connect.execute.manager.detachedTimeout": "12s",
            "spark.connect.execute.manager.maintenanceInterval": "2s",
            "spark.connect.execute.reattachable.senderMaxStreamDuration": "4s",
        }
    )
    case = spark_connect_case(engine, tmp_path)
    backend = SparkConnectBackend(engine.url, read_timeout_seconds=2)
    polled, polled_marks = case.request(seconds=26)
    progress = tmp_path / polled.payload["name"] / "progress.json"
    progress.parent.mkdir()
    progress.write_text("{}")
    handle = backend.submit(polled, backend.mint(polled, case.identity(polled)))
    unread = 0
    while not (status := backend.poll(handle)).state.terminal:
        started_s = time.monotonic()
        try:
            backend.read_texts(f"{handle.output_uri}/progress.json")
        except BackendUnavailable:
            unread += 1
        assert time.monotonic() - started_s < 10, "a watcher must not hang with the read"
        time.sleep(1)
    assert status.state is RunState.SUCCEEDED
    assert backend.result(handle)["world_size"] == 2
    assert polled_marks.ranks() == [0, 1]
    assert unread >= 2, "the ranks held every slot"
    said = [record for record in caplog.records if "no free task slot" in record.message]
    assert [record.levelname for record in said].count("WARNING") == 1, "said once"
    assert backend.read_texts(f"{handle.output_uri}/progress.json") == {"progress.json": "{}"}, (
        "and read when there is a slot again"
    )

    # The counter-proof: without polls the server gives the run up, and says so ever after.
    forgotten, marks = case.request(seconds=60)
    lost = backend.submit(forgotten, backend.mint(forgotten, case.identity(forgotten)))

    def started():
        backend.poll(lost)  # starting takes longer than the time-out on a busy machine
        return len(marks.pids()) == 2

    wait_for(started, 60, "both ranks started")
    wait_for(lambda: not alive(marks.pids()), 45, "an abandoned run was stopped by the server")
    assert backend.poll(lost).state is RunState.CANCELLED
    backend.submit(forgotten, lost)
    assert backend.poll(lost).state is RunState.CANCELLED
    assert marks.ranks() == [0, 1]
