# SPDX-License-Identifier: Apache-2.0
"""The embedded engine: a Spark Connect server on this machine, in a process group of its own.

It outlives whoever started it (an Airflow worker, a test, a terminal): its state file tells any
other process where it listens, and ``stop`` ends the whole group.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

import filelock

from deepspeed_provider.errors import EngineError
from deepspeed_provider.local.jvm import JAVA_MODULE_OPTIONS, find_jvm
from deepspeed_provider.local.processes import (
    ProcessRecord,
    free_port,
    last_line,
    require_free,
    search_path,
    start_group,
    stop_group,
    stop_recorded,
    write_atomically,
)
from deepspeed_provider.local.worker_daemons import end_idle_daemons

STATE_FILE = "engine.json"
SETTINGS_FILE = "settings.json"
HOME_VARIABLE = "DEEPSPEED_PROVIDER_HOME"

# One Spark task slot per rank, plus slots so that reading progress and preparing data never wait
# for a training that holds its barrier slots for hours.
SPARE_TASK_SLOTS = 2

# Keys whose values Spark itself hides (source: Spark 4.3, the default of spark.redaction.regex).
SECRET_KEY = re.compile(r"secret|password|token|access[.]?key", re.IGNORECASE)

SPARK_CONF: Mapping[str, str] = {
    # An operation without a reattach is cancelled after this time; Airflow may be down for days.
    "spark.connect.execute.manager.detachedTimeout": "7d",
    # A session that nobody asks for ends, with its run and its result: longer than Airflow is down or a retry
    # waits, shorter than an engine lives. Each poll and each fetched result counts as asking.
    "spark.connect.session.manager.defaultSessionTimeout": "7d",
    # Ended operations and sessions stay known, so that a later attempt still finds how its run ended.
    "spark.connect.execute.manager.abandonedTombstonesSize": "100000",
    "spark.connect.session.manager.closedSessionsTombstonesSize": "100000",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
    "spark.eventLog.buffer.kb": "8k",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.ansi.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    # The server is the executor too; a dropped heartbeat on a busy laptop must not kill a training.
    "spark.executor.heartbeatInterval": "60s",
    "spark.network.timeout": "1h",
    # Ranks are heavy processes; a fresh Python worker per task keeps their environment clean.
    "spark.python.worker.reuse": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo(ProcessRecord):
    """Where a running engine listens, and the process that leads its group."""

    port: int
    ui_port: int | None
    home: str
    ranks: int

    @property
    def url(self) -> str:
        return f"sc://127.0.0.1:{self.port}"

    @property
    def ui_url(self) -> str | None:
        return f"http://127.0.0.1:{self.ui_port}" if self.ui_port else None

    @property
    def event_log_dir(self) -> Path:
        return Path(self.home, "events")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How to start the engine.

    Attributes:
        ranks: how many training processes must fit side by side.
        port: of Spark Connect; 0 takes a free one.
        ui_port: of the Spark UI; 0 takes a free one, None switches it off.
        python: interpreter of the workers, the one that has torch and DeepSpeed.
        driver_memory: heap of the JVM; the ranks live outside it.
        conf: more Spark settings, which win over ours.
        environment: the whole environment of the server; None inherits this process's.
    """

    ranks: int = 2
    port: int = 0
    ui_port: int | None = 0
    python: str = sys.executable
    driver_memory: str = "1g"
    conf: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] | None = None
    start_timeout_seconds: float = 120.0


def default_home() -> Path:
    """State folder of the engine: ``DEEPSPEED_PROVIDER_HOME``, else ``~/.deepspeed-provider``."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".deepspeed-provider").absolute()


class EmbeddedEngine:
    """Starts, finds and stops the engine of one state folder.

    Without settings it starts as it was last started from this folder (secrets among the Spark settings and
    the environment excepted, which are not written down), else with the defaults. As a context manager it
    starts an engine and stops it at the end, for tests.
    """

    def __init__(
        self,
        home: Path | None = None,
        settings: EngineSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.home = (home or default_home()).absolute() / "engine"
        self.settings = settings or self._last_settings() or EngineSettings()
        self._clock = clock
        self._sleep = sleep

    @property
    def log_path(self) -> Path:
        return self.home / "engine.log"

    @property
    def url(self) -> str:
        """Connection URL of the running engine; raises EngineError when it does not run."""
        info = self.running()
        if info is None:
            raise EngineError(
                f"No embedded engine runs from {self.home}; start one with `deepspeed-provider engine start`."
            )
        return info.url

    def running(self) -> EngineInfo | None:
        """The live engine of this folder, or None."""
        info = self._recorded()
        return info if info is not None and info.alive else None

    def _recorded(self) -> EngineInfo | None:
        try:
            return EngineInfo(**json.loads((self.home / STATE_FILE).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _last_settings(self) -> EngineSettings | None:
        try:
            return EngineSettings(**json.loads((self.home / SETTINGS_FILE).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _write_settings(self) -> None:
        wire = asdict(self.settings) | {
            "conf": {key: value for key, value in self.settings.conf.items() if not SECRET_KEY.search(key)}
        }
        del wire["environment"]
        if self.settings.python == sys.executable:
            # Another environment may start it next time; then its own interpreter has what is needed.
            del wire["python"]
        write_atomically(self.home / SETTINGS_FILE, json.dumps(wire, indent=2, sort_keys=True))

    def ensure(self) -> EngineInfo:
        """The running engine, started if there is none. Safe against concurrent callers."""
        self.home.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(self.home / "engine.lock"):
            info = self.running()
            if info is None:
                return self._start()
            end_idle_daemons(info.pid)
            return info

    def stop(self, grace_seconds: float = 15.0) -> None:
        """Ends the server and everything it started; returns when no process is left."""
        if not self.home.exists():
            return
        with filelock.FileLock(self.home / "engine.lock"):
            info = self._recorded()
            if info is not None:
                stop_recorded(info, grace_seconds)
            (self.home / STATE_FILE).unlink(missing_ok=True)

    def __enter__(self) -> EmbeddedEngine:
        self.ensure()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> EngineInfo:
        # Its import takes seconds, in which a Ctrl-C may be lost: not while a server is being waited for.
        importlib.import_module("deepspeed_provider.backends.connect_wire")
        (self.home / "events").mkdir(exist_ok=True)
        (self.home / "scratch").mkdir(exist_ok=True)
        settings = self.settings
        port = settings.port or free_port()
        ui_port = None if settings.ui_port is None else settings.ui_port or free_port()
        require_free(port, "Spark Connect")
        server, record = start_group(
            self._command(port, ui_port), environment=self._environment(), folder=self.home, log_path=self.log_path
        )
        info = EngineInfo(
            pid=record.pid,
            created=record.created,
            port=port,
            ui_port=ui_port,
            home=str(self.home),
            ranks=settings.ranks,
        )
        # Written before the health check: whoever kills us meanwhile can still find and stop it.
        write_atomically(self.home / STATE_FILE, json.dumps(asdict(info)))
        try:
            self._wait_until_healthy(server, info)
        except BaseException:
            stop_group(server.pid, 2.0)
            raise
        self._write_settings()
        return info

    def _command(self, port: int, ui_port: int | None) -> list[str]:
        spec = importlib.util.find_spec("pyspark")
        jars = Path(spec.origin).parent / "jars" if spec and spec.origin else None
        if jars is None or not jars.is_dir():
            raise EngineError(
                "The embedded engine needs full pyspark with its jars, which is not installed. "
                "Install `airflow-provider-deepspeed[local]`."
            )
        settings = self.settings
        conf = {
            **SPARK_CONF,
            "spark.master": f"local[{settings.ranks + SPARE_TASK_SLOTS}]",
            "spark.driver.memory": settings.driver_memory,
            "spark.connect.grpc.binding.port": str(port),
            "spark.eventLog.dir": (self.home / "events").as_uri(),
            "spark.local.dir": str(self.home / "scratch"),
            "spark.sql.warehouse.dir": (self.home / "warehouse").as_uri(),
            "spark.ui.enabled": "false" if ui_port is None else "true",
            **({} if ui_port is None else {"spark.ui.port": str(ui_port)}),
            **settings.conf,
        }
        return [
            str(find_jvm(settings.environment).java),
            f"-Xmx{settings.driver_memory}",
            *JAVA_MODULE_OPTIONS,
            "-cp",
            f"{jars}/*",
            "org.apache.spark.deploy.SparkSubmit",
            "--class",
            "org.apache.spark.sql.connect.service.SparkConnectServer",
            "--name",
            "deepspeed-provider embedded engine",
            *(word for key, value in conf.items() for word in ("--conf", f"{key}={value}")),
            "spark-internal",
        ]

    def _environment(self) -> dict[str, str]:
        inherited = os.environ if self.settings.environment is None else self.settings.environment
        environment = {
            name: value
            for name, value in inherited.items()
            # Left over from a client in this process, these would turn the server into a client.
            if name not in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_LOCAL_REMOTE", "SPARK_HOME")
            # Connections, keys and task variables of Airflow are no business of a cluster's processes.
            and not name.lstrip("_").startswith("AIRFLOW")
        }
        environment["PYSPARK_PYTHON"] = self.settings.python
        environment["PATH"] = search_path(self.settings.python, environment)
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
        environment["SPARK_LOCAL_HOSTNAME"] = "localhost"
        return environment

    def _wait_until_healthy(self, server: subprocess.Popen[bytes], info: EngineInfo) -> None:
        deadline = self._clock() + self.settings.start_timeout_seconds
        while self._clock() < deadline:
            if server.poll() is not None:
                raise EngineError(
                    f"The embedded engine ended while starting (exit status {server.returncode}). "
                    f"Its log, {self.log_path}, ends with: {last_line(self.log_path)}"
                )
            if answers(info.url):
                return
            self._sleep(0.2)
        raise EngineError(
            f"The embedded engine did not answer on port {info.port} within "
            f"{self.settings.start_timeout_seconds:g} s. See {self.log_path}."
        )


def ensure_engine(home: Path | None = None, settings: EngineSettings | None = None) -> EngineInfo:
    """The running engine of ``home``, started when there is none."""
    return EmbeddedEngine(home, settings).ensure()


def answers(url: str) -> bool:
    """Whether a Spark Connect server answers at ``url`` (one cheap call, no session left behind)."""
    from deepspeed_provider.backends.connect_wire import ConnectWire

    with ConnectWire(url, user_id="health-check") as wire:
        return wire.healthy(timeout_seconds=2.0)
