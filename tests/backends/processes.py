"""Looking at real processes: whose work is still running."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil


def alive(pids: list[int]) -> list[int]:
    """Those of ``pids`` that still run (zombies have ended)."""

    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if runs(pid)]


def mentioning(text: str) -> list[psutil.Process]:
    """Processes other than this one whose command line or environment contains ``text``."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if process.pid != os.getpid() and any(text in word for word in words):
            found.append(process)
    return found


def children_with(pid: int, word: str) -> list[psutil.Process]:
    """Children of a process that still run and whose command line contains ``word``."""
    # Of one that has ended and is not waited for there is no command line: None stands for it.
    found = list(psutil.process_iter(["ppid", "cmdline"]))
    return [each for each in found if each.info["ppid"] == pid and word in " ".join(each.info["cmdline"] or [])]


def wait_for(condition: Callable[[], object], seconds: float, what: str, *, pause_s: float = 0.1) -> None:
    """Waits for something that another process does; fails with ``what`` when it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(pause_s)
