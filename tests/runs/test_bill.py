# SPDX-License-Identifier: Apache-2.0
"""What a run costs: told now and then, and never in the way of the run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from deepspeed_provider.backends.base import BackendUnavailable, RunHandle
from deepspeed_provider.runs.bill import BETWEEN_LOOKS_S, Bill, Meter

HANDLE = RunHandle(backend="b", token="t", generation=1, output_uri="mem://x", world_size=1, ids={})


class Platform:
    """Counts looks; ``seconds`` is what it says, or raises."""

    def __init__(self, seconds: Any) -> None:
        self.seconds = seconds
        self.looks: list[float] = []

    def billed_seconds(self, handle: RunHandle, now_ms: float) -> float | None:
        assert handle is HANDLE
        self.looks.append(now_ms)
        if isinstance(self.seconds, Exception):
            raise self.seconds
        return self.seconds


@pytest.mark.parametrize(
    ("bill", "said", "wire"),
    [
        pytest.param(
            Bill(seconds=5400, usd_per_hour=10),
            "$15.00 for 90 min of the cluster at $10.00 an hour",
            {"billed_seconds": 5400, "cost_usd": 15.0},
            id="priced",
        ),
        pytest.param(
            Bill(seconds=90.04),
            "2 min of the cluster",
            {"billed_seconds": 90.0, "cost_usd": None},
            id="without a price",
        ),
    ],
)
def test_a_bill_for_people_and_for_tasks(bill: Bill, said: str, wire: dict[str, Any]) -> None:
    assert str(bill) == said
    assert bill.to_json() == wire


def test_it_looks_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now_s, platform = [1000.0], Platform(60.0)
    meter = Meter(usd_per_hour=6.0, clock=lambda: now_s[0], log=logging.getLogger("meter"))
    with caplog.at_level(logging.INFO):
        for _ in range(61):
            meter.tell_so_far(platform, HANDLE)  # type: ignore[arg-type]
            now_s[0] += BETWEEN_LOOKS_S / 30
    assert platform.looks == [1300e3, 1600e3], "nothing is known of a run that has just begun"
    assert caplog.messages == ["So far: $0.10 for 1 min of the cluster at $6.00 an hour."] * 2


@pytest.mark.parametrize(
    "platform",
    [
        pytest.param(Platform(None), id="no such run"),
        pytest.param(Platform(BackendUnavailable("gone")), id="no answer"),
        pytest.param(object(), id="a cluster that has no bill"),
    ],
)
def test_what_is_not_told_is_not_told(platform: Any, caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter(usd_per_hour=6.0, clock=lambda: 1.0, log=logging.getLogger("meter"))
    with caplog.at_level(logging.INFO):
        meter.tell_so_far(platform, HANDLE)
    assert meter.read(platform, HANDLE) is None
    assert caplog.messages == []
