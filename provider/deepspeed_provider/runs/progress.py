# SPDX-License-Identifier: Apache-2.0
"""What a run is doing, told in the task's log while somebody waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from deepspeed_provider.backends.base import Backend, RunHandle
from deepspeed_provider.runs import evidence
from deepspeed_provider.runs.bill import Meter


class ProgressLog:
    """Tells each step of one run's progress once, and now and then what it has cost."""

    def __init__(self, *, meter: Meter, log: logging.Logger | Any) -> None:
        self._meter = meter
        self._log = log
        self._told: str | None = None

    def tell(self, connect: Callable[[], Backend], handle: RunHandle) -> bool:
        """Blocks. True where there was news; never raises, since the run does not depend on it."""
        try:
            backend = connect()
            self._meter.tell_so_far(backend, handle)
            texts = backend.read_texts(f"{handle.output_uri}/progress.json")
        except Exception as error:  # noqa: BLE001  (see above)
            self._log.debug("Progress cannot be read: %s", error)
            return False
        progress = evidence.read_progress(texts.values())
        if progress is None or str(progress) == self._told:
            return False
        self._told = str(progress)
        self._log.info("%s", progress)
        return True
