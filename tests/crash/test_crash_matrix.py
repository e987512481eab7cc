"""A real ``airflow standalone`` whose processes are killed, whose tasks are cleared and marked.

Runs are counted by the lines that each rank appends and by the Spark server's event log, never by what
Airflow or our own record believes. Most of a scenario is waiting, so those that leave the services alone
run side by side in one Airflow, and each is a test of its own that reports how its scenario went.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
from backends import processes
from backends.event_log import jobs_of_operation
from backends.marks import Marks
from backends.processes import alive, children_with
from deepspeed_provider.local.airflow_api import AirflowApi
from deepspeed_provider.local.engine import EmbeddedEngine, EngineSettings
from deepspeed_provider.local.processes import free_port, start_group, stop_group
from deepspeed_provider.local.services import airflow_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DAGS = Path(__file__).parent / "dags"
TASK = "run"
SIDE_BY_SIDE = 3
MODES = ("deferred", "blocking", "restart", "deadline_deferred", "deadline_blocking")
SCENARIOS: dict[str, Callable[[Stack], None]] = {}

# Scenarios asking Airflow ten times a second would keep a small machine busy.
wait_for = partial(processes.wait_for, pause_s=0.5)


@dataclass(frozen=True)
class Stack:
    api: AirflowApi
    airflow: object
    engine: EmbeddedEngine
    folder: Path
    extra: list

    def trigger(self, mode, **conf):
        return Run(self, f"crash_{mode}", **conf)


class Run:
    """One DAG run and what it leaves behind."""

    def __init__(self, stack, dag_id, **conf):
        self.stack, self.dag_id = stack, dag_id
        self.folder = stack.folder / f"{dag_id}-{uuid.uuid4().hex[:8]}"
        self.folder.mkdir()
        self.marks = Marks(self.folder / "marks")
        self.run_id = stack.api.trigger(dag_id, {"folder": str(self.folder), **conf})

    @property
    def task(self):
        return self.stack.api.tasks(self.dag_id, self.run_id)[0]

    @property
    def state(self):
        return self.stack.api.run_state(self.dag_id, self.run_id)

    def wait_for_task(self, *states, seconds=180):
        wait_for(
            lambda: self.task.state in states, seconds, f"task {states}, not {self.task.state}: {self.log()[-3000:]}"
        )

    def wait_for_ranks(self, count=2):
        wait_for(lambda: len(self.marks.lines()) >= count, 180, f"{count} ranks started")

    def worker_pid(self, attempt=0):
        path = self.folder / "worker-pids"
        processes.wait_for(path.exists, 180, "a worker came to submit")
        return int(path.read_text().split()[attempt])

    def wait_for_try(self, number):
        wait_for(lambda: self.task.try_number >= number, 120, f"try {number} began, not {self.task}")

    def log(self):
        try:
            return "\n".join(line.text for line in self.stack.api.log_lines(self.dag_id, self.run_id, self.task))
        except Exception as error:  # noqa: BLE001 - only for messages
            return str(error)

    def end(self, state="success", seconds=300):
        wait_for(
            lambda: self.state in ("success", "failed"),
            seconds,
            f"the run ended; task {self.task}: {self.log()[-3000:]}",
        )
        assert self.state == state, self.log()[-5000:]

    def result(self):
        return self.stack.api.xcom(self.dag_id, self.run_id, TASK)

    def patch_task(self, state):
        path = f"/dags/{self.dag_id}/dagRuns/{self.run_id}/taskInstances/{TASK}"
        self.stack.api.call("PATCH", path, json={"new_state": state})

    def clear(self):
        body = {
            "dry_run": False,
            "dag_run_id": self.run_id,
            "task_ids": [TASK],
            "only_failed": False,
            "reset_dag_runs": True,
        }
        self.stack.api.call("POST", f"/dags/{self.dag_id}/clearTaskInstances", json=body)

    def names(self):
        """Each run that really started, by the name in its ranks' marks, with its ranks."""
        found: dict[str, list[int]] = {}
        for line in self.marks.lines():
            found.setdefault(line["name"], []).append(int(line["rank"]))
        return {name: sorted(ranks) for name, ranks in found.items()}

    def assert_runs(self, count):
        names = self.names()
        assert list(names.values()) == [[0, 1]] * count, (names, self.log()[-3000:])
        wait_for(lambda: not alive(self.marks.pids()), 30, "no rank survives")

    def assert_one_job(self):
        events = self.stack.engine.ensure().event_log_dir
        assert jobs_of_operation(events, self.result()["operation_id"]) == 1


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crash")
    engine = EmbeddedEngine(folder, EngineSettings(ranks=2 * SIDE_BY_SIDE, ui_port=None))
    service = airflow_service(folder, port=free_port(), dags_folder=DAGS, mlflow_url="")
    settings = {
        "MLFLOW_TRACKING_URI": "",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3",
        # What else would be waited for: a lost triggerer, a cleared or marked task that has not noticed.
        "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
        "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "10",
        "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
        "AIRFLOW__CORE__PARALLELISM": str(2 * SIDE_BY_SIDE),
        "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "300",
        "PYTHONPATH": str(DAGS.parents[1]),
    }
    service = dataclasses.replace(service, environment={**service.environment, **settings})
    extra: list[psutil.Process] = []
    try:
        service.start()
        engine.ensure()
        service.wait()
        api = AirflowApi.of_home(service.url, service.folder)
        for mode in MODES:
            api.wait_for_dag(f"crash_{mode}", 90)
        yield Stack(api, service, engine, folder, extra)
    finally:
        for pid in extra:
            stop_group(pid, 10)
        service.stop()
        engine.stop()


@pytest.fixture(scope="module")
def outcomes(stack, request):
    """What became of each scenario that a test asks for, all of them under way."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.function is test_side_by_side]
    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    try:
        yield {name: pool.submit(SCENARIOS[name], stack) for name in SCENARIOS if name in wanted}
    finally:
        pool.shutdown(cancel_futures=True)


def scenario(function, *arguments, name=None):
    SCENARIOS[name or function.__name__] = lambda stack: function(stack, *arguments)
    return function


def deadline_cancels_and_fails_without_a_retry(stack, mode):
    run = stack.trigger(mode, seconds=300)
    run.end("failed")
    # On a busy machine the deadline may pass before the ranks are up.
    assert len(run.names()) <= 1
    wait_for(lambda: not alive(run.marks.pids()), 30, "no rank survives")
    assert run.task.try_number == 1
    assert "deadline" in run.log()


def worker_killed_while_submitting(stack, mode, delay):
    run = stack.trigger(mode, seconds=3)
    worker = run.worker_pid()
    time.sleep(delay)
    os.kill(worker, signal.SIGKILL)
    run.end()
    run.assert_runs(1)
    run.assert_one_job()
    assert run.result()["generation"] == 1


def marked_failed_cancels(stack, mode):
    run = stack.trigger(mode, seconds=300)
    run.wait_for_ranks()
    run.wait_for_task("deferred" if mode == "deferred" else "running")
    run.patch_task("failed")
    run.end("failed")
    wait_for(lambda: not alive(run.marks.pids()), 60, "the ranks of the cancelled run went away")
    run.assert_runs(1)


for mode in ("deferred", "blocking"):
    scenario(deadline_cancels_and_fails_without_a_retry, f"deadline_{mode}", name=f"deadline, {mode}")


@scenario
def cleared_after_success_runs_anew(stack):
    run = stack.trigger("deferred", seconds=1)
    run.end()
    run.assert_runs(1)
    run.clear()
    run.wait_for_try(2)
    run.end()
    run.assert_runs(2)
    assert run.result()["generation"] == 2


def cleared_while_alive_attaches(stack, mode):
    run = stack.trigger(mode, seconds=25)
    run.wait_for_ranks()
    run.wait_for_task("deferred" if mode == "deferred" else "running")
    run.clear()
    run.wait_for_try(2)
    run.end()
    run.assert_runs(1)
    run.assert_one_job()
    assert run.result()["generation"] == 1


for mode in ("deferred", "blocking"):
    scenario(cleared_while_alive_attaches, mode, name=f"cleared while alive, {mode}")


@scenario
def cleared_while_running_with_restart_starts_anew(stack):
    run = stack.trigger("restart", seconds=25)
    run.wait_for_ranks()
    run.wait_for_task("running")
    run.clear()
    run.wait_for_try(2)
    run.end()
    run.assert_runs(2)
    assert run.result()["generation"] == 2


@scenario
def worker_killed_while_running(stack):
    run = stack.trigger("blocking", seconds=15)
    run.wait_for_ranks()
    os.kill(run.worker_pid(), signal.SIGKILL)
    run.end()
    run.assert_runs(1)
    run.assert_one_job()
    assert run.task.try_number == 2, "a later try attached"


for mode, delay_s in (("blocking", 0.0), ("deferred", 0.2), ("deferred", 0.5), ("blocking", 0.9)):
    scenario(worker_killed_while_submitting, mode, delay_s, name=f"worker killed while submitting, {mode}, {delay_s}")
for mode in ("deferred", "blocking"):
    scenario(marked_failed_cancels, mode, name=f"marked failed, {mode}")


@pytest.mark.parametrize("name", SCENARIOS)
def test_side_by_side(outcomes, name):
    outcomes[name].result()


def triggerers(service):
    return children_with(service.running().pid, "triggerer")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["restarted", "killed"])
def test_triggerer_gone_while_deferred(stack, number):
    run = stack.trigger("deferred", seconds=20)
    run.wait_for_ranks()
    run.wait_for_task("deferred")
    old = [*triggerers(stack.airflow), *(psutil.Process(pid) for pid in stack.extra)]
    assert old
    below = [child for process in old for child in process.children(recursive=True)]
    for process in old:
        os.kill(process.pid, number)
    _, left = psutil.wait_procs([*old, *below], timeout=30)
    for orphan in left:
        # A killed triggerer leaves its log server behind, and that holds its port.
        orphan.kill()
    stack.extra.clear()
    _, record = start_group(
        [stack.airflow.command[0], "-m", "airflow", "triggerer"],
        environment=stack.airflow.environment,
        folder=stack.airflow.folder,
        log_path=stack.folder / "triggerer.log",
    )
    stack.extra.append(record.pid)
    run.end()
    run.assert_runs(1)
    run.assert_one_job()


def test_every_process_is_gone_with_the_stack(stack):
    """Nothing that a scenario started is left on the cluster while Airflow still stands."""
    with_marks = [Marks(path).pids() for path in stack.folder.glob("*/marks")]
    assert not alive([pid for pids in with_marks for pid in pids])
