"""Ends what works in a folder as soon as the tests that made it have gone, however they went.

Airflow and the clusters are sessions of their own, which nobody would end after ``kill -9`` of the tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from backends.processes import mentioning

TESTS = Path(__file__).parents[1]


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Nothing whose command or environment names the folder outlives this, or this process."""
    guardian = subprocess.Popen(
        [sys.executable, "-m", "crash.guardian", str(folder)],
        cwd=TESTS,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
    finally:
        # Closed by the kernel, too, when this process dies.
        guardian.communicate()


def end_all(folder: str) -> None:
    """Again and again, as somebody may be starting another process."""
    while left := mentioning(folder):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=5)


if __name__ == "__main__":
    sys.stdin.read()
    end_all(sys.argv[1])
