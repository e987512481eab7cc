# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive whoever started them, and are found and ended again by a record on disk."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from deepspeed_provider.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A process id is used again after its owner's death; with the start time it is unique.

    ``created`` is in seconds since the epoch.
    """

    pid: int
    created: float

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            started, status = process.create_time(), process.status()
        except psutil.NoSuchProcess:
            return False
        return bool(abs(started - self.created) < 2 and status != psutil.STATUS_ZOMBIE)


def start_group(
    command: Sequence[str], *, environment: Mapping[str, str], folder: Path, log_path: Path
) -> tuple[subprocess.Popen[bytes], ProcessRecord]:
    """Starts a command as the leader of a new session, its output appended to ``log_path``."""
    with log_path.open("ab") as log:
        leader = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
        )
    return leader, ProcessRecord(pid=leader.pid, created=psutil.Process(leader.pid).create_time())


def stop_group(pid: int, grace_seconds: float) -> None:
    """Terminates the process group led by ``pid`` and everything below it, then kills what is left."""
    family = _family(pid)
    _signal_group(pid, signal.SIGTERM)
    _, left = psutil.wait_procs(family, timeout=grace_seconds)
    family = list({*left, *_family(pid)})
    _signal_group(pid, signal.SIGKILL)
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=5)


def stop_recorded(record: ProcessRecord, grace_seconds: float) -> None:
    """Ends the group of a recorded leader, also when the leader itself is dead already.

    A group keeps its number while it has members, so only a living stranger can have taken it over.
    """
    if record.alive or not psutil.pid_exists(record.pid):
        stop_group(record.pid, grace_seconds)


def _family(pid: int) -> list[psutil.Process]:
    try:
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def search_path(python: str, environment: Mapping[str, str]) -> str:
    """``PATH`` with the folder of an interpreter first: its scripts (``airflow``, ``ninja``) are called
    by bare name, and its virtual environment need not be activated."""
    return os.pathsep.join([str(Path(python).parent), environment.get("PATH", os.defpath)])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_free(port: int, service: str) -> None:
    """Raises EngineError naming the service when somebody else listens on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise EngineError(
                f"Port {port}, wanted by {service}, is in use by another program. Stop it or choose another port."
            ) from None


def last_line(path: Path) -> str:
    """The last non-empty line of a log, or a note that there is none."""
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        lines = []
    return lines[-1] if lines else "(nothing)"


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file so that a reader sees the old text or the new, never half of one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
