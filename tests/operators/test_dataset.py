# SPDX-License-Identifier: Apache-2.0
"""Ending the preparation of a data set: its work on the cluster ends with it."""

from __future__ import annotations

import copy
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException
from backends.event_log import jobs_by_end
from backends.processes import wait_for
from deepspeed_provider.operators.dataset import PrepareDatasetOperator


def make_operator(base_uri: str, **options: Any) -> PrepareDatasetOperator:
    return PrepareDatasetOperator(
        task_id="prepare", spec={"model": "m", "data": "docstrings"}, base_uri=base_uri, **options
    )


class InterruptedSession:
    """A hook, its backend and its session; ``interruptAll`` answers what was running."""

    def __init__(self, running: list[list[str]]) -> None:
        self.running = running
        self.interrupts = 0
        self.interrupted = threading.Event()

    def get_backend(self) -> InterruptedSession:
        return self

    @contextmanager
    def session(self) -> Any:
        yield self

    def interruptAll(self) -> list[str]:
        self.interrupts += 1
        answer = self.running.pop(0)
        if answer:
            self.interrupted.set()
        return answer


def test_a_kill_in_between_two_operations_is_repeated_until_it_meets_one() -> None:
    operator, session = make_operator("mem://o"), InterruptedSession([[], ["operation"]])

    def work() -> None:
        with operator._interruptible(session):
            operator.on_kill()
            assert session.interrupted.wait(10)
            raise RuntimeError("OPERATION_CANCELED")

    with pytest.raises(AirflowException, match="told to end"):
        work()
    assert session.interrupts == 2


def test_a_kill_before_the_session_is_open_does_no_work() -> None:
    operator = make_operator("mem://o")
    operator.on_kill()
    with pytest.raises(AirflowException, match="told to end"), operator._interruptible(InterruptedSession([])):
        raise AssertionError("the work began")


def test_the_operator_can_be_copied() -> None:
    assert copy.deepcopy(make_operator("mem://o")).base_uri == "mem://o"


@pytest.mark.slow
def test_a_kill_ends_the_work_on_the_cluster(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default corpus, whose extraction takes a good while, in this thread; the kill comes from another."""
    monkeypatch.setenv("DEEPSPEED_PROVIDER_HOME", str(Path(engine.home).parent))
    events = engine.ensure().event_log_dir
    before = jobs_by_end(events)
    operator, killed_at = make_operator(tmp_path.as_uri()), []

    def kill_at_work() -> None:
        # After the versions, asked twice, and the claim on the folder comes the extraction, the longest job.
        wait_for(lambda: new_jobs("well") >= 3 and new_jobs("running"), 120, "the preparation is at work")
        killed_at.append(time.monotonic())
        operator.on_kill()

    def new_jobs(state: str) -> int:
        return jobs_by_end(events)[state] - before[state]

    killer = threading.Thread(target=kill_at_work)
    killer.start()
    with pytest.raises(AirflowException, match="told to end"):
        operator.execute({})
    killer.join()
    assert time.monotonic() - killed_at[0] < 30, "interrupted, not waited for"
    wait_for(lambda: new_jobs("running") == 0, 20, "no job of the preparation goes on")
    assert new_jobs("failed") > 0
    assert not list(tmp_path.glob("datasets/*/_preparing-*")), "what was half written is gone"
    assert not list(tmp_path.glob("datasets/*/manifest.json"))
