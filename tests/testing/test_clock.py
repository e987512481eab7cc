# SPDX-License-Identifier: Apache-2.0
"""Virtual time passes when it is told to, with each question, or faster than on the wall; never backwards."""

from __future__ import annotations

import pytest
from deepspeed_provider.testing.clock import START_MS, VirtualClock
from hypothesis import given
from hypothesis import strategies as st


class Wall:
    """Seconds on the wall, as a test says."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_time_stands_still_by_itself() -> None:
    wall = Wall()
    clock = VirtualClock(monotonic=wall)
    wall.now_s += 3600
    clock.polled()
    assert clock.now_ms == START_MS


@given(steps=st.lists(st.floats(0, 1e5)))
def test_every_step_adds_up(steps: list[float]) -> None:
    clock = VirtualClock()
    before = clock.now_ms
    for seconds in steps:
        clock.advance(seconds)
        assert clock.now_ms >= before
        before = clock.now_ms
    assert clock.now_ms == pytest.approx(START_MS + 1000 * sum(steps), abs=1)


def test_a_question_lets_time_pass() -> None:
    clock = VirtualClock(poll_s=30)
    clock.polled()
    clock.polled()
    assert clock.now_ms == START_MS + 60_000


def test_virtual_hours_pass_in_real_seconds() -> None:
    wall = Wall()
    clock = VirtualClock(speed=3600, monotonic=wall)
    wall.now_s += 2
    clock.advance(1)
    assert clock.now_ms == START_MS + 7_201_000


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="forwards only"):
        VirtualClock().advance(-1)
