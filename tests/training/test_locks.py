# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deepspeed_provider.training import locks

from training import tiny_runs

# torch's own class takes seconds to import; its lock is exactly this open().
HOLDER = """
import os, sys, time
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A process in the middle of compiling an operator below ``tmp_path``."""
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process, lock
    process.kill()
    process.wait()


def test_a_lock_is_abandoned_only_once_its_maker_is_dead(
    builder: tuple[subprocess.Popen, Path], tmp_path: Path
) -> None:
    process, lock = builder
    assert locks.clear_abandoned(tmp_path) == []
    assert lock.exists()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert locks.clear_abandoned(tmp_path) == [lock]
    assert not lock.exists()
    assert locks.clear_abandoned(tmp_path) == []


def test_torch_marks_a_compilation_with_a_file_it_holds_open(tmp_path: Path) -> None:
    """If torch changes that, a living compilation would look abandoned."""
    from torch.utils.file_baton import FileBaton

    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    assert locks.clear_abandoned(tmp_path) == []
    baton.release()
    assert not lock.exists()


def test_exclusive_lets_one_in_at_a_time_and_survives_a_killed_holder(tmp_path: Path) -> None:
    script = f"""
import sys, time, pathlib
sys.path.insert(0, {str(tiny_runs.PACKAGE_ROOT)!r})
from deepspeed_provider.training.locks import exclusive
with exclusive(pathlib.Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(60)
"""
    lock = str(tmp_path / "below" / "lock")
    first, second = (
        subprocess.Popen([sys.executable, "-c", script, lock], stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    try:
        lines = {process: process.stdout for process in (first, second)}
        ready, _, _ = select.select(list(lines.values()), [], [], 10)
        assert len(ready) == 1
        holder = first if ready[0] is first.stdout else second
        waiter = second if holder is first else first
        assert select.select([waiter.stdout], [], [], 0.3)[0] == []
        holder.kill()
        assert select.select([waiter.stdout], [], [], 10)[0] == [waiter.stdout]
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
