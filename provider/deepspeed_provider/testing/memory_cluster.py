# SPDX-License-Identifier: Apache-2.0
"""A Spark Connect cluster in memory: our operators and trigger run against it, and nothing trains.

It keeps the promises of :mod:`deepspeed_provider.backends.base`. What happens to a run is told with the functions of
:mod:`deepspeed_provider.testing.run_scripts`.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from deepspeed_provider.backends.base import (
    BackendUnavailable,
    RunHandle,
    RunIdentity,
    RunRequest,
    RunState,
    RunStatus,
)
from deepspeed_provider.errors import FineTuneError
from deepspeed_provider.testing.results import usual_manifest, usual_result
from deepspeed_provider.testing.run_scripts import Script, succeeds

if TYPE_CHECKING:
    from deepspeed_provider.training.prepare import PrepareSettings

BASE_URI: Final = "memory://runs"
Answer = TypeVar("Answer")


@dataclass
class FakeRun:
    """One run that the cluster holds.

    Attributes:
        states: what the looks to come will see; the last one stays.
    """

    request: RunRequest
    script: Script
    cancel_requests: int = 0

    def __post_init__(self) -> None:
        self.states = list(self.script.states)

    @property
    def state(self) -> RunState:
        return self.states[0]

    def advance(self) -> RunState:
        return self.states.pop(0) if len(self.states) > 1 else self.state

    def result(self, token: str) -> dict[str, Any]:
        """What rank 0 returns."""
        asked = self.request
        request = {
            "token": token,
            "payload": asked.payload,
            "output_uri": asked.output_uri,
            "nodes": asked.nodes,
            "gpus_per_node": asked.gpus_per_node,
        }
        return {**usual_result(request), **self.script.result}


@dataclass
class FakeCluster:
    """What is true on the cluster, whoever asks. All of one process: its threads share it, others do not see it.

    Attributes:
        scripts: of the runs to come, in order of submission. default_script: of those after them.
        runs: all that it holds, by token. datasets: what was prepared on it.
        files: texts on its storage, by URI.
        outage: so many of the next calls find the cluster unreachable.
        on_call: sees (verb, "before" | "after") of every call and may raise.
        stop_polls: looks that a cancelled run takes to stop.
        calls: every verb so far.
    """

    scripts: list[Script] = field(default_factory=list)
    default_script: Script = field(default_factory=succeeds)
    runs: dict[str, FakeRun] = field(default_factory=dict)
    datasets: list[PrepareSettings] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    outage: int = 0
    on_call: Callable[[str, str], None] = lambda *_: None
    stop_polls: int = 1
    calls: list[str] = field(default_factory=list)

    def next_run(self, *scripts: Script) -> None:
        """Scripts the next runs that nothing is scripted for yet."""
        self.scripts.extend(scripts)

    @property
    def connection_json(self) -> str:
        """An Airflow connection to it, as ``AIRFLOW_CONN_…`` takes it."""
        return json.dumps({"conn_type": "spark_connect", "host": "memory", "extra": {"base_uri": BASE_URI}})

    @property
    def cancels(self) -> int:
        """How often somebody asked to cancel a run."""
        return sum(run.cancel_requests for run in self.runs.values())

    @property
    def alive(self) -> int:
        return sum(not run.state.terminal for run in self.runs.values())

    def lose_everything(self) -> None:
        """The server died and came back empty; files stay."""
        self.runs.clear()


class FakeBackend:
    """The cluster as one process asks it, by the verbs of the real backends."""

    name = "fake"

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def mint(self, request: RunRequest, identity: RunIdentity) -> RunHandle:
        return RunHandle.minted(self.name, request, identity, operation_id=identity.uuid("operation"))

    def submit(self, request: RunRequest, handle: RunHandle) -> RunHandle:
        def arrive() -> RunHandle:
            if handle.token not in self.cluster.runs:
                script = self.cluster.scripts.pop(0) if self.cluster.scripts else self.cluster.default_script
                self.cluster.runs[handle.token] = FakeRun(request=request, script=script)
            return handle

        return self._call("submit", arrive)

    def poll(self, handle: RunHandle) -> RunStatus:
        def look() -> RunStatus:
            run = self.cluster.runs.get(handle.token)
            state = RunState.LOST if run is None else run.advance()
            if run is not None and state.terminal:
                self._leave_files(run, handle)
            return RunStatus(state=state, detail=f"fake {state}")

        return self._call("poll", look)

    def result(self, handle: RunHandle) -> Any:
        def fetch() -> Any:
            run = self.cluster.runs[handle.token]
            if run.state is not RunState.SUCCEEDED:
                raise FineTuneError(run.script.failure)
            return run.result(handle.token)

        return self._call("result", fetch)

    def cancel(self, handle: RunHandle) -> None:
        def stop() -> None:
            run = self.cluster.runs.get(handle.token)
            if run is not None:
                run.cancel_requests += 1
                if not run.state.terminal:
                    run.states = [RunState.TERMINATING] * self.cluster.stop_polls + [RunState.CANCELLED]

        self._call("cancel", stop)

    def read_texts(self, uri_pattern: str) -> dict[str, str]:
        def read() -> dict[str, str]:
            return {
                uri.rpartition("/")[2]: text
                for uri, text in self.cluster.files.items()
                if fnmatch.fnmatchcase(uri, uri_pattern)
            }

        return self._call("read_texts", read)

    @contextmanager
    def session(self) -> Iterator[FakeSession]:
        """Stands for a Spark session, on which only :meth:`prepare_dataset` works."""
        yield FakeSession()

    def prepare_dataset(self, _: FakeSession, settings: PrepareSettings) -> dict[str, Any]:
        """Prepares nothing, and tells of a data set of a hundred rows."""

        def prepare() -> dict[str, Any]:
            self.cluster.datasets.append(settings)
            return usual_manifest(asdict(settings))

        return self._call("prepare_dataset", prepare)

    def _leave_files(self, run: FakeRun, handle: RunHandle) -> None:
        if run.state is RunState.CANCELLED:
            return
        left = dict(run.script.files)
        if run.state is RunState.SUCCEEDED:
            left["result.json"] = json.dumps(run.result(handle.token))
        for name, text in left.items():
            self.cluster.files.setdefault(f"{handle.output_uri}/{name}", text)

    def _call(self, verb: str, action: Callable[[], Answer]) -> Answer:
        self.cluster.on_call(verb, "before")
        self.cluster.calls.append(verb)
        if self.cluster.outage:
            self.cluster.outage -= 1
            raise BackendUnavailable("connection refused")
        answer = action()
        self.cluster.on_call(verb, "after")
        return answer


class FakeSession:
    """What a task that is told to end interrupts, and a connection test asks for its version."""

    version = "in memory"

    def interruptAll(self) -> list[str]:
        return []
