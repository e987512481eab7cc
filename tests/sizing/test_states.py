# SPDX-License-Identifier: Apache-2.0
"""Bytes per trained parameter, and of packed weights."""

from __future__ import annotations

import pytest
from deepspeed_provider.sizing.options import Optimizer, Precision
from deepspeed_provider.sizing.states import OPTIMIZERS, PRECISIONS, nf4_bytes, state_bytes

MILLION = 1_000_000


@pytest.mark.parametrize(
    ("precision", "each"),
    [("fp32", 4 + 4 + 8), ("fp16", 2 + 2 + 4 + 8), ("bf16", 2 + 2 + 4 + 8), ("pure-bf16", 2 + 2 + 4)],
)
def test_adamw_in_each_precision(precision, each):
    widths = PRECISIONS[Precision(precision)]
    states = state_bytes(MILLION, Optimizer.ADAMW, Precision(precision))
    assert MILLION * (widths.weight + widths.gradient + widths.master) + states == each * MILLION


@pytest.mark.parametrize(
    ("optimizer", "precision", "expected"),
    [
        ("adamw", "bf16", 8 * MILLION),
        ("paged-adamw", "bf16", 8 * MILLION),
        ("adamw", "pure-bf16", 4 * MILLION),
        # Two bytes, and two fp32 maxima for each 256 parameters.
        ("adamw-8bit", "bf16", 2 * MILLION + 2 * 4 * 3907),
        ("paged-adamw-8bit", "fp32", 2 * MILLION + 2 * 4 * 3907),
        ("sgd", "bf16", 0),
        ("sgd-momentum", "bf16", 4 * MILLION),
        ("sgd-momentum", "pure-bf16", 2 * MILLION),
    ],
)
def test_optimizer_states(optimizer, precision, expected):
    assert state_bytes(MILLION, Optimizer(optimizer), Precision(precision)) == expected


def test_every_choice_has_its_row():
    assert set(PRECISIONS) == set(Precision)
    assert set(OPTIMIZERS) == set(Optimizer)


@pytest.mark.parametrize(
    ("weights", "double_quant", "expected"),
    [
        (64, False, 32 + 4),
        (64, True, 32 + 1 + 4),
        (64 * 256, False, 32 * 256 + 4 * 256),
        (64 * 256, True, 32 * 256 + 256 + 4),
        (64 * 256 + 1, True, 32 * 256 + 1 + 257 + 2 * 4),
    ],
)
def test_packed_weights(weights, double_quant, expected):
    assert nf4_bytes(weights, double_quant=double_quant) == expected


def test_packed_weights_of_a_published_archive():
    """Qwen2.5-7B on a T4: 3,111.5 MiB packed, 388.95 MiB of scales without double quantisation."""
    weights = 28 * (3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18_944)
    assert nf4_bytes(weights, double_quant=False) / 2**20 == pytest.approx(3111.5 + 388.95, rel=1e-4)
