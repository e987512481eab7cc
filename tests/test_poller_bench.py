# SPDX-License-Identifier: Apache-2.0
"""The poller's bench: what it says of its own numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benches import poller


def measured(requests: int, delay_s: float = 1.5) -> poller.Measured:
    return poller.Measured(requests=requests, cpu_s=1.0, delays_s=[0.0, delay_s, 3.0])


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        pytest.param(measured(100), "10.0 times fewer, detection +0.0 s; ", id="just enough"),
        pytest.param(measured(50, delay_s=1.7), "20.0 times fewer, detection +0.2 s; ", id="chance"),
    ],
)
def test_the_target_is_met(ours: poller.Measured, said: str) -> None:
    found = poller.verdict(both(ours))
    assert said in found
    assert found.endswith(": met")


@pytest.mark.parametrize(
    "ours",
    [
        pytest.param(measured(101), id="too many requests"),
        pytest.param(measured(50, delay_s=2.0), id="later"),
    ],
)
def test_the_target_is_missed(ours: poller.Measured) -> None:
    assert poller.verdict(both(ours)).endswith(": MISSED")


def test_the_growth_of_both_is_told() -> None:
    assert "from 20 runs to 200 requests grow 2.5 times with ours and 10.0 times with the provider's." in (
        poller.verdict(both(measured(50)))
    )


def both(ours: poller.Measured) -> dict[int, dict[str, poller.Measured]]:
    """20 runs beside 200, where the provider's trigger asks 100 and 1,000 times."""
    return {
        20: {poller.THEIRS: measured(100), poller.OURS: measured(20)},
        200: {poller.THEIRS: measured(1000), poller.OURS: ours},
    }
