# SPDX-License-Identifier: Apache-2.0
"""What a run costs, by the time that its cluster is really there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from deepspeed_provider.backends.base import Backend, Billed, RunHandle

# A look costs a request.
BETWEEN_LOOKS_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """``usd_per_hour`` is of the whole cluster; None where no price is known, and then there is no cost either."""

    seconds: float
    usd_per_hour: float | None = None

    @property
    def usd(self) -> float | None:
        return None if self.usd_per_hour is None else self.seconds / 3600 * self.usd_per_hour

    def __str__(self) -> str:
        minutes = f"{self.seconds / 60:,.0f} min of the cluster"
        return minutes if self.usd is None else f"${self.usd:,.2f} for {minutes} at ${self.usd_per_hour:,.2f} an hour"

    def to_json(self) -> dict[str, Any]:
        """For a task's output."""
        return {"billed_seconds": round(self.seconds, 1), "cost_usd": None if self.usd is None else round(self.usd, 4)}


class Meter:
    """Tells what one run has cost. Never raises: the run does not depend on it."""

    def __init__(self, *, usd_per_hour: float | None, clock: Callable[[], float], log: logging.Logger | Any) -> None:
        self._usd_per_hour = usd_per_hour
        self._clock = clock
        self._log = log
        self._looks_at_s = clock() + BETWEEN_LOOKS_S

    def tell_so_far(self, backend: Backend, handle: RunHandle) -> None:
        """In the log, now and then."""
        if self._clock() < self._looks_at_s:
            return
        self._looks_at_s = self._clock() + BETWEEN_LOOKS_S
        bill = self.read(backend, handle)
        if bill is not None and bill.seconds > 0:
            self._log.info("So far: %s.", bill)

    def read(self, backend: Backend, handle: RunHandle) -> Bill | None:
        """Until now, or until the run's end; None where the cluster does not tell."""
        if not isinstance(backend, Billed):
            return None
        try:
            seconds = backend.billed_seconds(handle, self._clock() * 1000)
        except Exception as error:  # noqa: BLE001  (see above)
            self._log.debug("The cost cannot be read: %s", error)
            return None
        return None if seconds is None else Bill(seconds=seconds, usd_per_hour=self._usd_per_hour)
