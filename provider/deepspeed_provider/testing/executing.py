# SPDX-License-Identifier: Apache-2.0
"""A fake workspace whose Python tasks really run: each in a process of its own, with its own classic Spark session."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from deepspeed_provider.local.jvm import classic_java_home, find_jvm
from deepspeed_provider.local.processes import start_group, stop_group
from deepspeed_provider.testing.answers import whole
from deepspeed_provider.testing.endings import Ending, fails, succeeds
from deepspeed_provider.testing.mounted import MountedContents
from deepspeed_provider.testing.run_json import Run
from deepspeed_provider.testing.server import Handler, Request
from deepspeed_provider.testing.timeline import Phase
from deepspeed_provider.testing.workspace import FakeWorkspace, behaviour

# As long as nobody knows better.
FOR_EVER_S: Final = 1e8
LOOK_SECONDS: Final = 0.1
GRACE_SECONDS: Final = 3.0
MOST_LOG_BYTES: Final = 5 * 2**20

# As the platform's own shell does it: what the program raises is told apart from what it prints.
SHELL: Final = """
import json, runpy, sys, traceback
report, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
try:
    runpy.run_path(script, run_name="__main__")
except Exception as error:
    said = "".join(traceback.format_exception_only(error)).strip()
    whole = "".join(traceback.format_exception(error))
    with open(report, "w") as file:
        json.dump({"error": said, "error_trace": whole}, file)
    raise
"""
REPORT: Final = "error.json"
LOG: Final = "output.log"


@dataclass
class _Program:
    run: Run
    pid: int
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / LOG

    @property
    def error(self) -> Mapping[str, str]:
        """What it raised."""
        report = self.folder / REPORT
        found: Mapping[str, str] = json.loads(report.read_text()) if report.exists() else {}
        return found


class ExecutingWorkspace(FakeWorkspace):
    """Runs the ``spark_python_task`` of what is submitted, in real time.

    Volumes and workspace files lie below ``root``. Of the cluster that was asked for only its environment variables
    count, secrets in them filled in: neither its size nor its libraries nor its init scripts. A run is over when its
    program is; a cancelled or overdue program is ended, with all that it started.

    Args:
        python: interpreter of the programs.
        environment: of the programs, over this process's own.
    """

    def __init__(
        self,
        root: Path,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        cloud: str = "aws",
    ) -> None:
        super().__init__(cloud=cloud, speed=1.0, ended=lambda *_: None)
        self.contents = MountedContents(root / "files")
        self.files.contents = self.contents
        self.default_behaviour = behaviour(start_s=0, run_s=FOR_EVER_S, stop_s=FOR_EVER_S)
        self._root = root
        self._python = python
        self._environment = {
            **os.environ,
            "JAVA_HOME": str(classic_java_home(find_jvm(), root / "java")),
            "SPARK_LOCAL_IP": "127.0.0.1",
            # Of Spark's workers too, as on a cluster.
            "PYSPARK_PYTHON": python,
            **(environment or {}),
        }
        self._programs: dict[int, _Program] = {}
        self._watchers: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._starting = threading.Lock()

    def stop(self) -> None:
        """Ends every program too."""
        self._stopping.set()
        for watcher in self._watchers:
            watcher.join(GRACE_SECONDS + 10)
        super().stop()

    def _routes(self) -> dict[tuple[str, str], Handler]:
        return {**super()._routes(), ("POST", "jobs/runs/submit"): self._submit}

    def _submit(self, asked: Request) -> dict[str, Any]:
        answer = self.jobs.submit(asked.arguments)
        run_id = whole(answer, "run_id")
        with self._starting:
            if run_id not in self._programs:
                self._start(self.jobs.runs[run_id])
        return answer

    def _start(self, run: Run) -> None:
        task = run.tasks[0]
        script = task["spark_python_task"]
        words = [script["python_file"], *(script.get("parameters") or ())]
        folder = self._root / "programs" / str(run.run_id)
        folder.mkdir(parents=True)
        variables = (task.get("new_cluster") or {}).get("spark_env_vars") or {}
        environment = {**self._environment, **{name: self.secrets.resolve(text) for name, text in variables.items()}}
        # Isolated from this process's own modules: what the program needs has to have travelled.
        command = [self._python, "-I", "-c", SHELL, REPORT, *(self.contents.inside(word) for word in words)]
        leader, _ = start_group(command, environment=environment, folder=folder, log_path=folder / LOG)
        self._programs[run.run_id] = _Program(run=run, pid=leader.pid, folder=folder)
        watcher = threading.Thread(target=self._watch, args=(self._programs[run.run_id], leader), daemon=True)
        self._watchers.append(watcher)
        watcher.start()

    def _watch(self, program: _Program, leader: Any) -> None:
        """Ends the program when its run is to stop, and the run when its program has ended."""
        run = program.run
        while leader.poll() is None and not self._stopping.is_set():
            if run.course(self.clock.now_ms).phase is not Phase.RUNNING:
                break
            time.sleep(LOOK_SECONDS)
        stop_group(program.pid, GRACE_SECONDS)
        status = leader.wait()
        now_ms = self.clock.now_ms
        found = run.course(now_ms)
        begun = found.tasks[0].attempts[-1]
        if found.phase is Phase.RUNNING:
            ending = self._ending(program, status)
            lasted_s = (now_ms - begun.starts_ms) / 1000
            run.behaviour = replace(run.behaviour, endings=(ending,), run_s=lasted_s, stop_s=0.0)
        else:
            run.behaviour = replace(run.behaviour, stop_s=max(0.0, (now_ms - begun.ends_ms) / 1000))

    def _ending(self, program: _Program, status: int) -> Ending:
        with program.log.open("rb") as stream:
            stream.seek(max(0, program.log.stat().st_size - MOST_LOG_BYTES))
            logs = self.contents.outside(stream.read().decode(errors="replace"))
        if status == 0:
            return succeeds(logs=logs)
        told = {name: self.contents.outside(text) for name, text in program.error.items()}
        return fails(told.get("error", f"the program ended with status {status}"), logs=logs, **_trace(told))


def _trace(told: Mapping[str, str]) -> dict[str, str]:
    return {"error_trace": told["error_trace"]} if "error_trace" in told else {}
