# SPDX-License-Identifier: Apache-2.0
"""What happens to a run on the cluster in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from deepspeed_provider.backends.base import RunState
from deepspeed_provider.errors import Failure, FailureKind
from deepspeed_provider.training.evaluate import compare

STAGE_FAILED: Final = Failure(kind=FailureKind.UNKNOWN, message="the stage failed", evidence="operation error")
# What no rank lives to write a file about: the cluster says it.
TOLD_BY_THE_CLUSTER: Final = (FailureKind.CAPACITY, FailureKind.CANCELLED)


@dataclass(frozen=True, kw_only=True)
class Script:
    """What happens to one run.

    Attributes:
        states: what each look at it sees; the last one stays.
        result: of rank 0, over what the job returns by itself.
        failure: the operation's error, the evidence where no rank left a file.
        files: texts that its ranks leave below ``output_uri``, by name.
    """

    states: tuple[RunState, ...]
    result: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure = STAGE_FAILED
    files: Mapping[str, str] = field(default_factory=dict)


def succeeds(**result: Any) -> Script:
    """Ends well, with these entries in what rank 0 returns, beside the usual ones."""
    return Script(states=(RunState.RUNNING, RunState.SUCCEEDED), result=result)


def evaluates(*, base_loss: float, tuned_loss: float) -> Script:
    """An evaluation with these losses a token: the tuned model is better where its loss is lower."""
    return succeeds(metrics=compare(base_loss, tuned_loss))


def fails(kind: str, message: str = "scripted", *, rank: int = 0, step: int = 1, name: str = "RuntimeError") -> Script:
    """Fails with a kind, told as the real cluster tells it: in a rank's failure file, or by the cluster itself.

    Args:
        kind: of ``FailureKind``: ``USER``, ``GPU_OOM``, ``HOST_OOM``, ``CAPACITY``, ``TRANSIENT``, …
        name: class of the exception.
    """
    kind = FailureKind(kind)
    states = (RunState.RUNNING, RunState.FAILED)
    if kind in TOLD_BY_THE_CLUSTER:
        return Script(states=states, failure=Failure(kind=kind, message=message, evidence="operation error"))
    text = failure_file(rank, kind, 0.0, message, type=name, step=step, traceback=f"{name}: {message}")
    return Script(states=states, files={f"failure-rank{rank}.json": text})


def is_cancelled() -> Script:
    """The cluster ends it, and nobody here has asked for that."""
    return Script(states=(RunState.RUNNING, RunState.CANCELLED))


def is_lost() -> Script:
    """The cluster forgets it, as when its server dies."""
    return Script(states=(RunState.RUNNING, RunState.LOST))


def goes_on() -> Script:
    """Runs until somebody cancels it."""
    return Script(states=(RunState.RUNNING,))


def failure_file(rank: int, kind: str, time_s: float, message: str = "boom", **more: Any) -> str:
    """A failure file as the training side writes it."""
    record = {"rank": rank, "kind": kind, "time": time_s, "message": message, "type": "RuntimeError", "step": 3}
    return json.dumps({**record, "traceback": "line 1\nline 2\nRuntimeError: boom", **more})
