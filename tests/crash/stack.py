"""A real ``airflow standalone``, and the clusters that its tasks run on."""

from __future__ import annotations

import dataclasses
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from backends.processes import alive, children_with, wait_for
from deepspeed_provider.local.airflow_api import AirflowApi
from deepspeed_provider.local.processes import free_port, start_group, stop_group
from deepspeed_provider.local.services import Service, airflow_service

DAGS = Path(__file__).parent / "dags"
# The last of each file: those before it are there then, too.
LAST_DAGS = ("crash_mapped", "chaos_blocking")
TASKS_SIDE_BY_SIDE = 10
# With triggers in it, it takes ten seconds to notice, and twice ten to lose its patience with its own subprocess.
TRIGGERER_GRACE_SECONDS = 40.0
SCHEDULER_LOOK_SECONDS = 3.0
SETTINGS = {
    "MLFLOW_TRACKING_URI": "",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3",
    # What else would be waited for: a lost triggerer, a cleared or marked task that has not noticed.
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "10",
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
    "AIRFLOW__CORE__PARALLELISM": str(TASKS_SIDE_BY_SIDE),
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "300",
    "PYTHONPATH": str(DAGS.parents[1]),
}


class OneWriteAtATime(AirflowApi):
    """Airflow's API for several threads, whose server never waits for itself.

    It notes what a person does by a write in its event loop. While another request of the same server holds SQLite's
    lock, and needs the loop to give it back, both wait until one gives up: a minute in which no task gets an answer.
    """

    def __init__(self, url: str, username: str, password: str) -> None:
        super().__init__(url, username, password)
        self._write = threading.Lock()

    def call(self, method: str, path: str, **options: Any) -> Any:
        with nullcontext() if method == "GET" else self._write:
            return super().call(method, path, **options)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """An Airflow that is up. Lists: pids of those started after the first one was ended."""

    api: AirflowApi
    airflow: Service
    folder: Path
    triggerers: list[int] = field(default_factory=list)
    schedulers: list[int] = field(default_factory=list)

    def kill_scheduler(self) -> None:
        """Ends it with everything below it, as when its container is lost."""
        found = [*self._children("scheduler"), *(psutil.Process(pid) for pid in alive(self.schedulers))]
        assert found
        _kill([*found, *(child for process in found for child in process.children(recursive=True))])

    def replace_triggerer(self, number: signal.Signals) -> None:
        """Ends the triggerer by a signal, and starts another one."""
        old = [*self._children("triggerer"), *(psutil.Process(pid) for pid in self.triggerers)]
        assert old
        below = [child for process in old for child in process.children(recursive=True)]
        for process in old:
            os.kill(process.pid, number)
        # As a platform does it: after some grace what is left is killed. That is also the log server of a killed
        # triggerer, which holds its port.
        grace_s = TRIGGERER_GRACE_SECONDS if number == signal.SIGTERM else 0.0
        deadline_s = time.monotonic() + grace_s
        while time.monotonic() < deadline_s and alive([process.pid for process in old]):
            time.sleep(0.5)
        _kill([*old, *below])
        self.triggerers.clear()
        self.triggerers.append(self._start("triggerer"))

    def keep_a_scheduler(self, over: threading.Event) -> None:
        """Starts another one when it has ended: ``standalone`` does not, what runs an Airflow in earnest does.

        Airflow 3.3 ends its scheduler itself where a task is cleared in the moment in which an executor's word of
        its end is handled ("Failed to add object to the flush context").
        """
        wait_for(lambda: self._children("scheduler"), 60, "a scheduler started")
        while not over.wait(SCHEDULER_LOOK_SECONDS):
            if not self._children("scheduler") and not alive(self.schedulers):
                self.schedulers.append(self._start("scheduler"))

    def end_those_started_later(self) -> None:
        for pid in (*self.triggerers, *self.schedulers):
            stop_group(pid, 10)

    def _start(self, component: str) -> int:
        _, record = start_group(
            [self.airflow.command[0], "-m", "airflow", component],
            environment=self.airflow.environment,
            folder=self.airflow.folder,
            log_path=self.folder / f"{component}.log",
        )
        return record.pid

    def _children(self, component: str) -> list[psutil.Process]:
        running = self.airflow.running()
        assert running is not None
        return children_with(running.pid, component)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    wait_for(lambda: not alive([process.pid for process in processes]), 30, "killed processes ended")


def _let_readers_be(database: Path) -> None:
    """With a write-ahead log SQLite's writers need not wait for readers, of which looking at tasks makes many."""
    with closing(sqlite3.connect(database, timeout=60)) as connection:
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    assert mode == "wal"


@contextmanager
def standalone(folder: Path, environment: Mapping[str, str]) -> Iterator[Stack]:
    """Airflow with the DAGs of this folder; everything below it is ended at the end."""
    service = airflow_service(folder, port=free_port(), dags_folder=DAGS, mlflow_url="")
    service = dataclasses.replace(service, environment={**service.environment, **SETTINGS, **environment})
    # Another one than that of the tasks, for the same reason.
    ours = free_port()
    front = dataclasses.replace(
        service,
        name="API",
        port=ours,
        command=(*service.command[:-1], "api-server", "--apps", "core", "--port", str(ours)),
    )
    with ExitStack() as opened:
        opened.callback(service.stop)
        service.start()
        service.wait()
        _let_readers_be(folder / "airflow" / "airflow.db")
        opened.callback(front.stop)
        front.start()
        front.wait()
        api = OneWriteAtATime.of_home(front.url, front.folder)
        for dag_id in LAST_DAGS:
            api.wait_for_dag(dag_id, 90)
        stack = Stack(api=api, airflow=service, folder=folder)
        opened.callback(stack.end_those_started_later)
        over = threading.Event()
        keeper = opened.enter_context(ThreadPoolExecutor(1)).submit(stack.keep_a_scheduler, over)
        opened.callback(over.set)
        yield stack
    keeper.result()
