# SPDX-License-Identifier: Apache-2.0
"""A cluster in memory that keeps the promises of ``backends.base``, with a script for what happens on it."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deepspeed_provider.backends.base import (
    BackendUnavailable,
    RunHandle,
    RunIdentity,
    RunRequest,
    RunState,
    RunStatus,
)
from deepspeed_provider.errors import Failure, FailureKind, FineTuneError

STAGE_FAILED = Failure(kind=FailureKind.UNKNOWN, message="the stage failed", evidence="operation error")
SUCCESS = (RunState.PENDING, RunState.RUNNING, RunState.TERMINATING, RunState.SUCCEEDED)


class Crash(BaseException):
    """The process died here: nothing after this instruction happens in it."""


@dataclass
class FakeRun:
    """One run that the cluster holds; ``script`` is what each poll sees, the last state stays."""

    request: RunRequest
    script: list[RunState]
    cancel_requests: int = 0

    def advance(self) -> RunState:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


@dataclass
class FakeCluster:
    """What is true on the cluster, whoever asks.

    Attributes:
        scripts: of the runs to come, in order of submission; then ``SUCCESS``.
        outage: so many of the next calls find the cluster unreachable.
        on_call: sees (verb, "before" | "after") of every call and may raise.
        stop_polls: polls that a cancelled run takes to stop.
    """

    scripts: list[tuple[RunState, ...]] = field(default_factory=list)
    runs: dict[str, FakeRun] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    failure: Failure = STAGE_FAILED
    outage: int = 0
    on_call: Callable[[str, str], None] = lambda verb, moment: None
    stop_polls: int = 1
    calls: list[str] = field(default_factory=list)

    @property
    def cancels(self) -> int:
        return sum(run.cancel_requests for run in self.runs.values())

    @property
    def alive(self) -> int:
        return sum(not run.script[0].terminal for run in self.runs.values())

    def lose_everything(self) -> None:
        """The server died and came back empty; files stay."""
        self.runs.clear()


class FakeBackend:
    """A fresh one for each process, as the real ones."""

    name = "fake"

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def mint(self, request: RunRequest, identity: RunIdentity) -> RunHandle:
        return RunHandle(
            backend=self.name,
            token=identity.token,
            generation=identity.generation,
            output_uri=request.output_uri,
            world_size=request.world_size,
            ids={"operation_id": identity.uuid("operation")},
        )

    def submit(self, request: RunRequest, handle: RunHandle) -> RunHandle:
        def arrive() -> RunHandle:
            if handle.token not in self.cluster.runs:
                script = self.cluster.scripts.pop(0) if self.cluster.scripts else SUCCESS
                self.cluster.runs[handle.token] = FakeRun(request=request, script=list(script))
            return handle

        return self._call("submit", arrive)

    def poll(self, handle: RunHandle) -> RunStatus:
        def look() -> RunStatus:
            run = self.cluster.runs.get(handle.token)
            state = RunState.LOST if run is None else run.advance()
            return RunStatus(state=state, detail=f"fake {state}")

        return self._call("poll", look)

    def result(self, handle: RunHandle) -> Any:
        def fetch() -> Any:
            run = self.cluster.runs[handle.token]
            if run.script[0] is not RunState.SUCCEEDED:
                raise FineTuneError(self.cluster.failure)
            return {"token": handle.token, "model_uri": f"{handle.output_uri}/model"}

        return self._call("result", fetch)

    def cancel(self, handle: RunHandle) -> None:
        def stop() -> None:
            run = self.cluster.runs.get(handle.token)
            if run is not None:
                run.cancel_requests += 1
                if not run.script[0].terminal:
                    run.script = [RunState.TERMINATING] * self.cluster.stop_polls + [RunState.CANCELLED]

        self._call("cancel", stop)

    def read_texts(self, uri_pattern: str) -> dict[str, str]:
        def read() -> dict[str, str]:
            return {
                uri.rpartition("/")[2]: text
                for uri, text in self.cluster.files.items()
                if fnmatch.fnmatchcase(uri, uri_pattern)
            }

        return self._call("read_texts", read)

    def _call(self, verb: str, action: Callable[[], Any]) -> Any:
        self.cluster.on_call(verb, "before")
        self.cluster.calls.append(verb)
        if self.cluster.outage:
            self.cluster.outage -= 1
            raise BackendUnavailable("connection refused")
        answer = action()
        self.cluster.on_call(verb, "after")
        return answer


@dataclass
class FakeClock:
    """Time that passes only by sleeping."""

    now_s: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    async def asleep(self, seconds: float) -> None:
        self.now_s += seconds


def failure_file(rank: int, kind: str, time_s: float, message: str = "boom", **more: Any) -> str:
    """A failure file as the training side writes it."""
    record = {"rank": rank, "kind": kind, "time": time_s, "message": message, "type": "RuntimeError", "step": 3}
    return json.dumps({**record, "traceback": "line 1\nline 2\nRuntimeError: boom", **more})
