# SPDX-License-Identifier: Apache-2.0
"""What a task wants to have run, what it brings along, and how that can end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed_provider.backends.base import RunIdentity, RunRequest
from deepspeed_provider.errors import Failure
from deepspeed_provider.runs.record import OnClear, Outcome, RunRecord


class RecordStore(Protocol):
    """Keeps one record, across processes, tries and clears."""

    def load(self) -> RunRecord | None: ...

    def save(self, record: RunRecord) -> None: ...


class Tracker(Protocol):
    """Opens and ends the tracking run of a generation. Never raises."""

    def start(self, identity: RunIdentity) -> tuple[str | None, str | None]:
        """(run id, address for people), or Nones without tracking. Idempotent under the identity."""
        ...

    def end(self, run_id: str, outcome: Outcome) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a task wants to have run.

    Attributes:
        key: who asks: dag, run, task, map index.
        build: (token, tracking run id) to the request. Called with an empty token for the digest.
        timeout_s: from the minting on; None waits for ever.
        max_tries: of the task instance at this execution.
    """

    key: str
    build: Callable[[str, str | None], RunRequest]
    tracker: Tracker
    timeout_s: float | None
    max_tries: int
    on_clear: OnClear = OnClear.ATTACH


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The run is not judged yet: ask again later."""

    record: RunRecord
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run succeeded; ``result`` is what rank 0 returned."""

    record: RunRecord
    result: Any


class RunFailed(Exception):
    """The run was judged a failure, and its generation is closed; not where it may be alive, or have ended unseen."""

    def __init__(self, failure: Failure, record: RunRecord) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.record = record

    @property
    def retryable(self) -> bool:
        return not self.record.failed_for_good


class StillRunning(Exception):
    """A cancelled run did not stop within its bound; it may still cost money."""
