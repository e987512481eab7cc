"""What every backend promises, asked of real clusters.

The runs here train nothing, but they are real: a barrier stage, torchrun, one process a rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deepspeed_provider.backends.base import BackendUnavailable, RunHandle, RunState
from deepspeed_provider.errors import FineTuneError

from backends.processes import alive, wait_for

pytestmark = pytest.mark.slow


def wait_until_terminal(backend, handle, seconds=90):
    deadline = time.monotonic() + seconds
    while not (status := backend.poll(handle)).state.terminal:
        assert time.monotonic() < deadline, f"still {status} after {seconds} s"
        time.sleep(0.3)
    return status.state


def test_a_handle_is_minted_before_anything_is_sent_and_always_the_same(case):
    request, marks = case.request()
    handles = {json.dumps(case.connect().mint(request, case.identity(request)).to_json()) for _ in range(2)}
    assert len(handles) == 1
    other = case.connect().mint(request, case.identity(request, generation=2))
    assert other.token != json.loads(handles.pop())["token"]
    assert case.connect().poll(other).state in (RunState.LOST, RunState.UNSEEN)
    assert marks.lines() == []


def test_submit_returns_early_twice_is_once_and_any_client_sees_it_through(case):
    request, marks = case.request(seconds=4)
    minted = case.connect().mint(request, case.identity(request))
    handle = case.connect().submit(request, minted)
    assert not case.connect().poll(handle).state.terminal, "submit waited for the end"
    assert case.connect().submit(request, RunHandle.from_json(json.loads(json.dumps(minted.to_json())))) == handle
    assert wait_until_terminal(case.connect(), handle) is RunState.SUCCEEDED
    expected = {"name": request.payload["name"], "world_size": 2}
    assert case.connect().result(handle) == expected
    assert case.connect().result(handle) == expected, "a result may be fetched again"
    case.connect().submit(request, handle)
    assert case.connect().poll(handle).state is RunState.SUCCEEDED, "an ended run is not run again"
    assert marks.ranks() == [0, 1]
    assert case.count_runs(handle) == 1


def test_another_process_sees_state_and_result(case):
    request, _ = case.request()
    backend = case.connect()
    handle = backend.submit(request, backend.mint(request, case.identity(request)))
    wait_until_terminal(backend, handle)
    script = (
        "import json, sys\n"
        "from deepspeed_provider.backends.base import RunHandle\n"
        "from backends.cases import CONNECT\n"
        "backend, handle = CONNECT[sys.argv[1]](sys.argv[2]), RunHandle.from_json(json.loads(sys.argv[3]))\n"
        "print(json.dumps([backend.poll(handle).state, backend.result(handle)]))\n"
    )
    words = [sys.executable, "-c", script, case.name, case.address, json.dumps(handle.to_json())]
    tests = str(Path(__file__).parents[1])
    seen = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=60, cwd=tests).stdout
    seen = json.loads(seen.splitlines()[-1])
    assert seen == ["SUCCEEDED", {"name": request.payload["name"], "world_size": 2}]


def test_a_failed_run_says_what_the_rank_said(case):
    request, marks = case.request(error="the data set is empty")
    backend = case.connect()
    handle = backend.submit(request, backend.mint(request, case.identity(request)))
    assert wait_until_terminal(backend, handle) is RunState.FAILED
    for client in (backend, case.connect()):
        with pytest.raises(FineTuneError, match="ValueError: the data set is empty"):
            client.result(handle)
    assert set(marks.ranks()) <= {0, 1}
    assert len(marks.ranks()) == len(set(marks.ranks())), "a failed run must not be retried by the cluster"


def test_cancel_from_another_client_ends_every_process_and_may_be_repeated(case):
    request, marks = case.request(seconds=120)
    backend = case.connect()
    handle = backend.submit(request, backend.mint(request, case.identity(request)))
    wait_for(lambda: len(marks.pids()) == 2, 60, "both ranks started")
    case.connect().cancel(handle)
    assert wait_until_terminal(case.connect(), handle, 30) is RunState.CANCELLED
    wait_for(lambda: not alive(marks.pids()), 15, "the ranks of a cancelled run went away")
    case.connect().cancel(handle)
    case.connect().submit(request, handle)
    assert case.connect().poll(handle).state is RunState.CANCELLED, "a cancelled identity is never run again"
    assert marks.ranks() == [0, 1]
    with pytest.raises(FineTuneError) as caught:
        case.connect().result(handle)
    assert caught.value.failure.kind == "CANCELLED"


def test_cancelling_what_never_arrived_or_has_ended_is_harmless(case):
    request, _ = case.request()
    backend = case.connect()
    minted = backend.mint(request, case.identity(request))
    backend.cancel(minted)
    handle = backend.submit(request, minted)
    assert wait_until_terminal(backend, handle) is RunState.SUCCEEDED
    backend.cancel(handle)
    assert backend.poll(handle).state is RunState.SUCCEEDED


@pytest.mark.parametrize("verb", ["submit", "poll", "cancel", "read_texts"])
def test_a_cluster_that_does_not_answer_is_unavailable_not_an_answer(case, verb):
    request, _ = case.request()
    backend = case.unreachable()
    handle = backend.mint(request, case.identity(request))
    calls = {
        "submit": lambda: backend.submit(request, handle),
        "poll": lambda: backend.poll(handle),
        "cancel": lambda: backend.cancel(handle),
        "read_texts": lambda: backend.read_texts(f"{case.uri}/x"),
    }
    with pytest.raises(BackendUnavailable):
        calls[verb]()


def test_small_texts_are_read_by_the_cluster(case):
    (case.folder / "failure-rank0.json").write_text('{"a":\n 1}')
    (case.folder / "failure-rank1.json").write_text("é")
    (case.folder / "other.json").write_text("no")
    found = case.connect().read_texts(f"{case.uri}/failure-rank*.json")
    assert found == {"failure-rank0.json": '{"a":\n 1}', "failure-rank1.json": "é"}
    assert case.connect().read_texts(f"{case.uri}/nothing*.json") == {}
