"""One DAG run under test: what is done to it, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import uuid
from functools import partial
from typing import Any

import psutil
from backends import processes
from backends.marks import Marks
from backends.processes import alive
from deepspeed_provider.errors import EngineError

from crash.stack import Stack

TASK = "run"
# Scenarios asking Airflow ten times a second would keep a small machine busy.
wait_for = partial(processes.wait_for, pause_s=0.5)


class Missed:
    """What was waited for in vain; as a text with all that there is to know, asked for only then."""

    def __init__(self, run: Run, what: str) -> None:
        self._run = run
        self._what = what

    def __str__(self) -> str:
        return f"{self._what}: {self._run}"


class Run:
    """A DAG run of one mode.

    Args:
        dag: file of the DAG. ``conf``: of its params, beside the folder.
    """

    def __init__(self, stack: Stack, mode: str, *, dag: str = "crash", **conf: Any) -> None:
        self.api, self.dag_id = stack.api, f"{dag}_{mode}"
        self.run_id = f"{mode}-{uuid.uuid4().hex[:8]}"
        self.folder = stack.folder / "runs" / self.run_id
        self.folder.mkdir(parents=True)
        self.marks = Marks(self.folder / "marks")
        base_uri = conf.pop("base_uri", None) or (self.folder / "out").as_uri()
        self.api.trigger(self.dag_id, {"folder": str(self.folder), "base_uri": base_uri, **conf}, run_id=self.run_id)

    @property
    def _path(self) -> str:
        return f"/dags/{self.dag_id}/dagRuns/{self.run_id}/taskInstances"

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """Its task instances as Airflow's API has them; several where the task is mapped."""
        return list(self.api.call("GET", self._path)["task_instances"])

    @property
    def task(self) -> dict[str, Any]:
        return self.tasks[0]

    @property
    def state(self) -> str:
        return self.api.run_state(self.dag_id, self.run_id)

    def wait_for_task(self, *states: str, seconds: float = 180) -> None:
        wait_for(lambda: self.task["state"] in states, seconds, self.unless(f"task {states}"))

    def wait_for_ranks(self, count: int = 2) -> None:
        wait_for(lambda: len(self.marks.lines()) >= count, 180, self.unless(f"{count} ranks started"))

    def wait_for_try(self, number: int) -> None:
        wait_for(lambda: self.task["try_number"] >= number, 120, self.unless(f"try {number} began"))

    def moments(self) -> list[dict[str, Any]]:
        """What workers said they reached, in order."""
        path = self.folder / "moments"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def worker_at(self, moment: str) -> int:
        """Pid of the first worker that reached a moment; waits for it."""

        def found() -> list[int]:
            return [each["pid"] for each in self.moments() if each["moment"] == moment]

        processes.wait_for(found, 180, self.unless(f"a worker came to {moment}"))
        return found()[0]

    def supervisor_of(self, worker: int) -> int:
        return psutil.Process(worker).ppid()

    def kill_worker_at(self, moment: str) -> int:
        worker = self.worker_at(moment)
        os.kill(worker, signal.SIGKILL)
        return worker

    def log(self, task: dict[str, Any] | None = None) -> str:
        return "\n".join(
            " ".join([str(entry.get("event", "")), *(each["exc_value"] for each in entry.get("error_detail") or ())])
            for entry in self.log_entries(task)
        )

    def log_entries(self, task: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """The last try's log, its trigger's lines included."""
        task = task or self.task
        path = f"{self._path}/{TASK}/logs/{max(task['try_number'], 1)}"
        query = {"full_content": "true", "map_index": task["map_index"]}
        content = self.api.call("GET", path, params=query, headers={"Accept": "application/json"})
        return [entry for entry in content["content"] if isinstance(entry, dict)]

    def failure(self) -> str:
        """What the last try failed with; empty where its process was killed, or given up by Airflow."""
        failed = [entry for entry in self.log_entries() if entry.get("event") == "Task failed with exception"]
        return str(failed[-1]["error_detail"][0]["exc_value"]) if failed else ""

    def end(self, state: str = "success", seconds: float = 300) -> None:
        wait_for(lambda: self.state in ("success", "failed"), seconds, self.unless("it ended"))
        assert self.state == state, str(self)

    def result(self, map_index: int = -1) -> dict[str, Any]:
        query = {"deserialize": "false", "map_index": map_index}
        value = self.api.call("GET", f"{self._path}/{TASK}/xcomEntries/return_value", params=query)["value"]
        return dict(json.loads(value) if isinstance(value, str) else value)

    def record(self) -> dict[str, Any] | None:
        """What the operator stored of its run; None before it did."""
        try:
            answer = self.api.call("GET", f"{self._path}/{TASK}/state-store/run")
        except EngineError as error:
            if " 404 " in str(error):
                return None
            raise
        value = answer["value"]
        return dict(json.loads(value) if isinstance(value, str) else value)

    def mark_task(self, state: str) -> None:
        self.api.call("PATCH", f"{self._path}/{TASK}", json={"new_state": state})

    def clear(self) -> None:
        body = {
            "dry_run": False,
            "dag_run_id": self.run_id,
            "task_ids": [TASK],
            "only_failed": False,
            "reset_dag_runs": True,
        }
        self.api.call("POST", f"/dags/{self.dag_id}/clearTaskInstances", json=body)

    def names(self) -> dict[str, list[int]]:
        """Each run that really started, by the name in its ranks' marks, with its ranks."""
        found: dict[str, list[int]] = {}
        for line in self.marks.lines():
            found.setdefault(line["name"], []).append(int(line["rank"]))
        return {name: sorted(ranks) for name, ranks in found.items()}

    def wait_until_ranks_are_gone(self, seconds: float = 60) -> None:
        wait_for(lambda: not alive(self.marks.pids()), seconds, self.unless("no rank survives"))

    def unless(self, what: str) -> Missed:
        """The message for when ``what`` does not happen."""
        return Missed(self, what)

    def __str__(self) -> str:
        try:
            tasks = [(each["map_index"], each["state"], each["try_number"]) for each in self.tasks]
            return f"{self.run_id}: tasks {tasks}, moments {self.moments()}, log:\n{self.log()[-4000:]}"
        except Exception as error:  # noqa: BLE001 - only for messages
            return f"{self.run_id}: {error}"
