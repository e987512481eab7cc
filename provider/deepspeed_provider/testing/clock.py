# SPDX-License-Identifier: Apache-2.0
"""Time on the fake workspace: it passes when a test says so, with each look at a run, or faster than on the wall."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z


class VirtualClock:
    """Milliseconds since the epoch.

    Args:
        poll_s: seconds that pass with each question about a run, so that a client that waits sees it go on without
            waiting itself; 0 leaves time alone.
        speed: virtual seconds a real second; 0 stands still between calls of ``advance``.
        monotonic: seconds on the wall, for ``speed``.
    """

    def __init__(
        self,
        *,
        start_ms: int = START_MS,
        poll_s: float = 0.0,
        speed: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.poll_s = poll_s
        self._speed = speed
        self._monotonic = monotonic
        self._start_ms = start_ms
        self._began_s = monotonic()
        self._advanced_s = 0.0
        self._lock = threading.Lock()

    @property
    def now_ms(self) -> int:
        passed_s = self._advanced_s + self._speed * (self._monotonic() - self._began_s)
        return self._start_ms + round(1000 * passed_s)

    def advance(self, seconds: float) -> None:
        """Lets so much time pass. Raises ValueError for less than none."""
        if seconds < 0:
            raise ValueError(f"seconds = {seconds!r}: time passes forwards only")
        with self._lock:
            self._advanced_s += seconds

    def polled(self) -> None:
        """A client has asked about a run."""
        if self.poll_s:
            self.advance(self.poll_s)
