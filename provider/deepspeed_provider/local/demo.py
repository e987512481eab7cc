# SPDX-License-Identifier: Apache-2.0
"""The whole product on one laptop: engine, MLflow, Airflow, and one real fine-tune through them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import filelock
import httpx
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepspeed_provider.errors import EngineError
from deepspeed_provider.local.airflow_api import FINISHED, AirflowApi, LogLine, TaskState
from deepspeed_provider.local.engine import EmbeddedEngine, EngineSettings
from deepspeed_provider.local.jvm import find_jvm
from deepspeed_provider.local.processes import require_free
from deepspeed_provider.local.services import Service, airflow_service, mlflow_service

DAG_ID = "finetune"
# Two ranks need about 7.2 GiB. Measured as proportional shares on two cores: 1.65 GiB for engine, MLflow and Airflow
# when they are up, 0.13 more of the engine with a run, 0.1 for a client of it, 0.25 a rank for its Spark worker and
# launcher. A rank of the default fine-tune reported a peak of 2.52 GiB itself, of which it shares 0.1.
BASE_MEMORY_BYTES = int(2.5 * 2**30)
RANK_MEMORY_BYTES = int(2.5 * 2**30)
REQUIRED_DISK_BYTES = 4 * 2**30
# `standalone` starts none of its parts again. Busy ones may be late by some of Airflow's own thresholds of 30 s.
UNHEALTHY_SECONDS = 240.0
PACKAGES = ("torch", "deepspeed", "transformers", "peft", "mlflow", "pyspark")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Where the demonstration lives and listens, and what it fine-tunes (the DAG's ``conf``)."""

    home: Path
    dags_folder: Path
    airflow_port: int = 8080
    mlflow_port: int = 5000
    ranks: int = 2
    conf: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """What came out: perplexities on the held-out split, and the registered version, if any."""

    state: str
    base_perplexity: float | None = None
    tuned_perplexity: float | None = None
    registered: Mapping[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether the tuned model was better than its base and was registered."""
        better = (
            self.base_perplexity is not None
            and self.tuned_perplexity is not None
            and self.tuned_perplexity < self.base_perplexity
        )
        return self.state == "success" and better and bool(self.registered.get("version"))


def preflight(settings: DemoSettings) -> None:
    """One clear sentence for what would stop the demonstration on any day; touches nothing that runs."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise EngineError(
            f"Not installed: {', '.join(missing)}. Run `make setup`, or install `airflow-provider-deepspeed[local]`."
        )
    find_jvm()
    if not list(settings.dags_folder.glob("*.py")):
        raise EngineError(f"There are no DAG files in {settings.dags_folder}; run from the checkout or pass --dags.")
    settings.home.mkdir(parents=True, exist_ok=True)
    free = psutil.disk_usage(str(settings.home)).free
    if free < REQUIRED_DISK_BYTES:
        raise EngineError(
            f"The demonstration needs {REQUIRED_DISK_BYTES / 2**30:.0f} GiB of free disk under {settings.home}, "
            f"and there are {free / 2**30:.1f} GiB. Make room, or choose another folder with --home."
        )


def require_memory(ranks: int) -> None:
    """Raises EngineError when the stack and that many training processes do not fit in what is free now."""
    required = BASE_MEMORY_BYTES + ranks * RANK_MEMORY_BYTES
    available = psutil.virtual_memory().available
    if available < required:
        fewer = ", or train fewer processes with --ranks 1" if ranks > 1 else ""
        raise EngineError(
            f"The demonstration needs {required / 2**30:.1f} GiB of free memory, and this machine has "
            f"{available / 2**30:.1f} GiB. Close something{fewer}."
        )


@contextmanager
def only_session(home: Path) -> Iterator[None]:
    """Holds a state folder for one demonstration; raises EngineError when another one lives there.

    The lock is the kernel's: it goes with this process, however that ends.
    """
    try:
        held = filelock.FileLock(home / "demo.lock").acquire(blocking=False)
    except filelock.Timeout:
        raise EngineError(
            f"Another demonstration is running from {home}. End it with Ctrl-C in its terminal, or run "
            "`deepspeed-provider demo` with another --home, --airflow-port and --mlflow-port."
        ) from None
    with held:
        yield


Stack = tuple[EmbeddedEngine, Service, Service]


def _stack(settings: DemoSettings) -> Stack:
    mlflow = mlflow_service(settings.home, settings.mlflow_port)
    airflow = airflow_service(
        settings.home, port=settings.airflow_port, dags_folder=settings.dags_folder, mlflow_url=mlflow.url
    )
    return EmbeddedEngine(settings.home, EngineSettings(ranks=settings.ranks)), mlflow, airflow


def stop_leftovers(settings: DemoSettings) -> None:
    """Ends what a killed session left: it holds our ports and our memory. Only for ``only_session``."""
    engine, mlflow, airflow = _stack(settings)
    for stop in (airflow.stop_leftover, mlflow.stop_leftover, engine.stop):
        stop()


@contextmanager
def running_stack(settings: DemoSettings, console: Console) -> Iterator[Stack]:
    """Engine, MLflow and Airflow, all answering; all gone when the block ends, however it ends.

    Only for ``only_session``: the engine of this home is then ours, also one that Airflow started anew.
    """
    engine, mlflow, airflow = _stack(settings)
    try:
        for service in (mlflow, airflow):
            require_free(service.port, service.name)
        with console.status("Starting the Spark Connect engine, MLflow and Airflow …"):
            airflow.start()
            mlflow.start()
            engine.ensure()
            mlflow.wait()
            airflow.wait()
        yield engine, mlflow, airflow
    finally:
        console.print("Stopping …")
        # Airflow first: a triggerer that meets a dead engine starts a new one.
        for stop in (airflow.stop, mlflow.stop, engine.stop):
            stop()


def follow(
    api: AirflowApi,
    run_id: str,
    say: Callable[[str], None],
    *,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Tells the state of each task and the new lines of its log until the run has ended.

    Raises EngineError after ``timeout_seconds``, and where a part of Airflow has ended, without which none goes on.
    """
    deadline = clock() + timeout_seconds
    all_well = clock()
    known: dict[str, str | None] = {}
    told: dict[tuple[str, int], int] = {}
    while True:
        state = api.run_state(DAG_ID, run_id)
        for task in api.tasks(DAG_ID, run_id):
            if task.state != known.get(task.task_id) and task.state is not None:
                say(f"[bold]{task.task_id}[/bold] is {task.state}")
            changed = task.state != known.get(task.task_id)
            known[task.task_id] = task.state
            if changed or task.state in ("running", "deferred"):
                _tell_new_lines(api, run_id, task, told, say)
        if state in FINISHED:
            return state
        if not (unhealthy := api.unhealthy()):
            all_well = clock()
        elif clock() - all_well > UNHEALTHY_SECONDS:
            raise EngineError(
                f"Airflow's {' and '.join(unhealthy)} reported nothing for {UNHEALTHY_SECONDS:g} s, and the run cannot "
                "go on without. Airflow's log says why; starting again is safe."
            )
        if clock() > deadline:
            raise EngineError(f"The run {run_id} did not end within {timeout_seconds:g} s.")
        sleep(3)


def _tell_new_lines(
    api: AirflowApi, run_id: str, task: TaskState, told: dict[tuple[str, int], int], say: Callable[[str], None]
) -> None:
    if task.state in (None, "scheduled", "queued"):
        return
    key = (task.task_id, task.try_number)
    try:
        lines = [line for line in api.log_lines(DAG_ID, run_id, task) if _worth_telling(line)]
    except EngineError:
        # The log of a task that has only just started is not there yet.
        return
    for line in lines[told.get(key, 0) :]:
        colour = {"error": "red", "warning": "yellow"}.get(line.level, "dim")
        say(f"  [{colour}]{task.task_id}: {escape(line.text)}[/{colour}]")
    told[key] = max(len(lines), told.get(key, 0))


def _worth_telling(line: LogLine) -> bool:
    """Our own words, and anybody's errors; the rest of a task's log is Airflow's account of itself."""
    ours = "deepspeed_provider" in line.logger and line.level in ("info", "warning")
    return bool(line.text.strip()) and (ours or line.level in ("error", "critical"))


def outcome(api: AirflowApi, run_id: str, state: str) -> DemoOutcome:
    """What the finished run says of itself, from the return values of its tasks."""
    succeeded = {task.task_id for task in api.tasks(DAG_ID, run_id) if task.state == "success"}
    if "evaluate" not in succeeded:
        return DemoOutcome(state=state)
    metrics = _value(api.xcom(DAG_ID, run_id, "evaluate"))["metrics"]
    return DemoOutcome(
        state=state,
        base_perplexity=metrics["base_perplexity"],
        tuned_perplexity=metrics["tuned_perplexity"],
        # Skipped when no name was asked for, failed when the model is no better: no version either way.
        registered=_value(api.xcom(DAG_ID, run_id, "register")) if "register" in succeeded else {},
    )


def _value(wire: Any) -> Any:
    return json.loads(wire) if isinstance(wire, str) else wire


def run_demo(settings: DemoSettings, console: Console, *, once: bool) -> DemoOutcome:
    """Starts everything, fine-tunes once, shows what came out; stays up until Ctrl-C unless ``once``."""
    preflight(settings)
    with only_session(settings.home):
        stop_leftovers(settings)
        require_memory(settings.ranks)
        return _run_session(settings, console, once=once)


def _run_session(settings: DemoSettings, console: Console, *, once: bool) -> DemoOutcome:
    ended = DemoOutcome(state="interrupted")
    stopping = threading.Event()
    with _interruptible(stopping), running_stack(settings, console) as stack:
        _, _, airflow = stack
        api = AirflowApi.of_home(airflow.url, airflow.folder)
        try:
            ended = _fine_tune_once(api, settings, stack, console)
            if not once:
                _show_addresses(console, *stack)
                console.print("Everything stays up until Ctrl-C.")
                stopping.wait()
        except BaseException:
            # Stopped by a person or an error: the run must not go on by itself when Airflow starts again.
            with suppress(EngineError, httpx.HTTPError):
                api.fail_unfinished_runs(DAG_ID)
            raise
        finally:
            # From here on everything is being stopped; a late Ctrl-C must not leave half of it.
            stopping.set()
    return ended


def _fine_tune_once(api: AirflowApi, settings: DemoSettings, stack: Stack, console: Console) -> DemoOutcome:
    _, _, airflow = stack
    api.wait_for_dag(DAG_ID, 120)
    _show_addresses(console, *stack)
    for earlier in api.fail_unfinished_runs(DAG_ID):
        console.print(f"Ended the run {earlier}, which an earlier session was stopped in.")
    run_id = api.trigger(DAG_ID, settings.conf)
    console.print(f"Triggered [bold]{DAG_ID}[/bold]: {airflow.url}/dags/{DAG_ID}/runs/{run_id}\n")
    state = follow(api, run_id, console.print, timeout_seconds=settings.timeout_seconds)
    ended = outcome(api, run_id, state)
    _show_outcome(console, ended)
    return ended


@contextmanager
def _interruptible(stopping: threading.Event) -> Iterator[None]:
    """Ends on Ctrl-C, a closed terminal or a termination alike, with everything stopped."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if stopping.is_set():
            # Being stopped already: a second Ctrl-C must not leave processes behind.
            return
        stopping.set()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_addresses(console: Console, engine: EmbeddedEngine, mlflow: Service, airflow: Service) -> None:
    password = json.loads((airflow.folder / "passwords.json").read_text())["admin"]
    info = engine.ensure()
    table = Table(show_header=False, box=None)
    table.add_row("Airflow", airflow.url, f"user admin, password {password}")
    table.add_row("MLflow", mlflow.url, "runs, metrics, registered models")
    table.add_row("Spark", info.ui_url or "", f"Spark Connect at {info.url}")
    table.add_row("Logs", os.path.relpath(airflow.folder.parent), "one folder holds all state")
    console.print(table)


def _show_outcome(console: Console, ended: DemoOutcome) -> None:
    if ended.base_perplexity is None:
        console.print(f"[red]The run ended as {ended.state}. The last error above says why.[/red]")
        return
    table = Table(title="Held-out answers", caption="lower perplexity is better")
    for heading in ("", "base", "fine-tuned"):
        table.add_column(heading)
    table.add_row("perplexity", f"{ended.base_perplexity:.2f}", f"{ended.tuned_perplexity:.2f}")
    console.print(table)
    registered = ended.registered
    if not registered:
        console.print(f"The run ended as {ended.state}; the model is not registered.")
        return
    console.print(
        f"Registered as [bold]{registered.get('name')}[/bold] version [bold]{registered.get('version')}[/bold] "
        f"({registered.get('alias')})"
    )
