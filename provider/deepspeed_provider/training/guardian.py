# SPDX-License-Identifier: Apache-2.0
"""No rank outlives the job that started it.

The distributor starts ``torch.distributed.run`` (the agent) below a Spark Python worker, and the
agent starts the ranks, each in a session of its own. When the worker is killed (stage cancelled,
server gone) nothing tells the agent or the ranks, and they would train on. So each rank watches
both, and takes the orphaned agent with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.5
EXIT_STATUS = 113
_PR_SET_PDEATHSIG = 1
# Variables that the JVM gives to each Spark Python worker (pyspark/daemon.py, 4.3).
SPARK_WORKER_MARKS = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHON_WORKER_FACTORY_SOCK_DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process id is used again after its owner's death; with the start time it is unique."""

    pid: int
    started_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Who started this rank: the torchrun agent, and the Spark Python worker above it."""

    agent: Process
    worker: Process | None


def start(environment: Mapping[str, str]) -> threading.Thread | None:
    """Watch this process's lineage from a daemon thread; None where there is no /proc (not Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    lineage = read_lineage()
    if lineage is None:
        return None
    if born_orphaned(lineage, environment):
        end_family(lineage)
    thread = threading.Thread(target=_watch, args=(lineage,), name="guardian", daemon=True)
    thread.start()
    return thread


def read_lineage() -> Lineage | None:
    """The lineage now; None where /proc cannot be read."""
    agent = describe(os.getppid())
    worker_pid = None if agent is None else parent_pid(agent.pid)
    if agent is None or worker_pid is None:
        return None
    return Lineage(agent=agent, worker=describe(worker_pid))


def born_orphaned(lineage: Lineage, environment: Mapping[str, str]) -> bool:
    """Whether the worker died before this rank could look.

    The agent (or this rank) then hangs below init or a sub-reaper. That is told from a genuine parent
    by the marks of a Spark worker, which its environment and ours must share.
    """
    marks = [mark for mark in SPARK_WORKER_MARKS if mark in environment]
    if not marks:
        return False
    return lineage.worker is None or not _shares_mark(lineage.worker.pid, marks)


def orphaned(lineage: Lineage) -> bool:
    """Whether the agent, or the worker above it, is gone."""
    if os.getppid() != lineage.agent.pid:
        return True
    if lineage.worker is None:
        return False
    return parent_pid(lineage.agent.pid) != lineage.worker.pid or describe(lineage.worker.pid) is None


def end_family(lineage: Lineage) -> None:
    """Kill the agent if it is still the one that started us, then end this rank without clean-up."""
    if _is_agent(lineage.agent):
        with suppress(OSError):
            os.kill(lineage.agent.pid, signal.SIGKILL)
    # Not sys.exit: the main thread may wait in a collective for ever.
    os._exit(EXIT_STATUS)


def describe(pid: int) -> Process | None:
    """The living process ``pid``; None when it is gone or a zombie."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return Process(pid=pid, started_ticks=int(fields[19]))


def parent_pid(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[1])


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (proc(5) field 3); the name before may hold spaces."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _shares_mark(pid: int, marks: list[str]) -> bool:
    if pid <= 1:
        return False
    try:
        names = {entry.partition(b"=")[0].decode() for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
    except (OSError, UnicodeDecodeError):
        return True  # not ours to read: believe the tree
    return any(mark in names for mark in marks)


def _is_agent(process: Process) -> bool:
    """A torchrun that still lives: never init, nor a sub-reaper that inherited this rank."""
    if process.pid <= 1 or describe(process.pid) != process:
        return False
    try:
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"torch.distributed" in command or b"torchrun" in command


def _watch(lineage: Lineage) -> None:
    rhythm = threading.Event()
    while not orphaned(lineage):
        rhythm.wait(POLL_SECONDS)
    # Whoever read our output may have died with the job: a broken pipe must not save this rank.
    with suppress(OSError, ValueError):
        print("guardian: the job that started this rank is gone; ending it", file=sys.stderr, flush=True)  # noqa: T201
    end_family(lineage)
