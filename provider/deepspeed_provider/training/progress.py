# SPDX-License-Identifier: Apache-2.0
"""What rank 0 tells the outside while it works: ``progress.json`` (now) and ``progress.jsonl`` (history)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from . import storage

log = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
# Where a file cannot grow in place its whole history is written each time.
REWRITE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One moment of a job.

    ``phase``: starting, preparing, loading, training, evaluating, generating, saving, logging or done.
    """

    phase: str
    time: float
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    eval_loss: float | None = None


class Reporter:
    """Keeps where this rank stands and, in rank 0, writes it about once a second.

    Writing never stops the job: the first failure is logged, and the next write tries again.

    Args:
        folder_uri: where the two files stand; None keeps the state only (ranks other than 0).
        clock: seconds since the epoch.
        peak_memory: peak memory of this rank in bytes so far.
    """

    def __init__(
        self, folder_uri: str | None, *, clock: Callable[[], float], peak_memory: Callable[[], int | None]
    ) -> None:
        self._folder_uri = folder_uri
        self._clock = clock
        self._peak_memory = peak_memory
        self._history: list[str] = []
        self._written_at_s = self._rewritten_at_s = float("-inf")
        self._warned = False
        self.now = Progress(phase="starting", time=clock())

    def update(self, **changes: Any) -> None:
        """Change fields of the present state; written at a phase change, at the last step, else by rhythm."""
        before = self.now
        state: dict[str, Any] = {**asdict(before), **changes, "time": self._clock()}
        self.now = Progress(**{**state, "peak_memory_bytes": self._peak_memory()})
        last_step = self.now.step == self.now.total_steps > 0 and self.now.step != before.step
        due = self.now.time - self._written_at_s >= WRITE_SECONDS
        if self._folder_uri is not None and (due or last_step or self.now.phase != before.phase):
            self._write(self._folder_uri, at_phase_change=self.now.phase != before.phase)

    def _write(self, folder_uri: str, *, at_phase_change: bool) -> None:
        self._written_at_s = self.now.time
        record = asdict(self.now)
        line = json.dumps(record) + "\n"
        try:
            storage.write_json(storage.join(folder_uri, "progress.json"), record)
            history_uri = storage.join(folder_uri, "progress.jsonl")
            if storage.appendable(history_uri):
                storage.append_text(history_uri, line)
                return
            self._history.append(line)
            if at_phase_change or self.now.time - self._rewritten_at_s >= REWRITE_SECONDS:
                self._rewritten_at_s = self.now.time
                storage.write_text(history_uri, "".join(self._history))
        except Exception as error:  # noqa: BLE001  (a full disk or a lost mount must not stop training)
            if not self._warned:
                log.warning("progress cannot be written to %s: %s", folder_uri, error)
            self._warned = True
