# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from deepspeed_provider.training.schedule import learning_rate_factor
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        pytest.param("constant", [0.5, 1, 1, 1, 1, 1], id="constant"),
        pytest.param("linear", [0.5, 1, 1, 0.75, 0.5, 0.25], id="linear"),
        pytest.param("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447], id="cosine"),
    ],
)
def test_six_steps_with_two_of_warm_up(schedule: str, factors: list[float]) -> None:
    found = [learning_rate_factor(step, total_steps=6, warmup_ratio=1 / 3, schedule=schedule) for step in range(6)]
    assert found == pytest.approx(factors, abs=1e-6)


@given(
    total=st.integers(1, 500),
    warmup=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
)
def test_every_step_learns_and_none_beyond_the_peak(total: int, warmup: float, schedule: str) -> None:
    factors = [
        learning_rate_factor(step, total_steps=total, warmup_ratio=warmup, schedule=schedule) for step in range(total)
    ]
    assert all(0 < factor <= 1 for factor in factors)
    assert max(factors) == pytest.approx(1)
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
