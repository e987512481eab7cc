# SPDX-License-Identifier: Apache-2.0
"""Bytes of model states on one GPU: weights, gradients, master weights, optimizer states, adapters.

The counts per parameter are those of the ZeRO paper (Rajbhandari et al. 2020, section 3.1) and of
DeepSpeed 0.19.8's optimizers; quantised weights as bitsandbytes packs them (QLoRA, Dettmers et al.
2023, sections 3 and 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from deepspeed_provider.sizing.options import Optimizer, Precision


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes per trained parameter."""

    weight: int
    gradient: int
    master: int
    state: int  # of one optimizer state


PRECISIONS: Final[Mapping[Precision, Widths]] = MappingProxyType(
    {
        Precision.FP32: Widths(weight=4, gradient=4, master=0, state=4),
        Precision.FP16: Widths(weight=2, gradient=2, master=4, state=4),
        Precision.BF16: Widths(weight=2, gradient=2, master=4, state=4),
        Precision.PURE_BF16: Widths(weight=2, gradient=2, master=0, state=2),
    }
)


@dataclass(frozen=True, kw_only=True)
class OptimizerStates:
    """``count`` states per parameter, in the precision's width or in one byte with a scale per block; ``paged``
    ones live in unified memory, which leaves the GPU when it is short."""

    count: int
    eight_bit: bool = False
    paged: bool = False


OPTIMIZERS: Final[Mapping[Optimizer, OptimizerStates]] = MappingProxyType(
    {
        Optimizer.ADAMW: OptimizerStates(count=2),
        Optimizer.ADAMW_8BIT: OptimizerStates(count=2, eight_bit=True),
        Optimizer.PAGED_ADAMW: OptimizerStates(count=2, paged=True),
        Optimizer.PAGED_ADAMW_8BIT: OptimizerStates(count=2, eight_bit=True, paged=True),
        Optimizer.SGD: OptimizerStates(count=0),
        Optimizer.SGD_MOMENTUM: OptimizerStates(count=1),
    }
)

# bitsandbytes' block-wise 8-bit optimizers keep one fp32 maximum for every 256 values.
EIGHT_BIT_BLOCK = 256
# NF4: 64 weights share a scale; with double quantisation 256 scales share a second one, and are 8-bit.
NF4_BLOCK = 64
NF4_NESTED_BLOCK = 256


def state_bytes(parameters: int, optimizer: Optimizer, precision: Precision) -> int:
    """All optimizer states of so many parameters, wherever they live."""
    states = OPTIMIZERS[optimizer]
    if states.eight_bit:
        return states.count * (parameters + 4 * math.ceil(parameters / EIGHT_BIT_BLOCK))
    return states.count * parameters * PRECISIONS[precision].state


def state_formula(optimizer: Optimizer, elements: str) -> str:
    """What :func:`state_bytes` sums up: n states of s bytes, or of one byte and scales."""
    if OPTIMIZERS[optimizer].eight_bit:
        return f"n * ({elements} + 4 * ceil({elements} / {EIGHT_BIT_BLOCK}))"
    return f"n * s * {elements}"


def state_numbers(optimizer: Optimizer, precision: Precision) -> dict[str, float]:
    """The n and the s of :func:`state_formula`."""
    states = OPTIMIZERS[optimizer]
    return {"n": states.count} if states.eight_bit else {"n": states.count, "s": PRECISIONS[precision].state}


def nf4_bytes(weights: int, *, double_quant: bool) -> int:
    """Packed weights (half a byte each) with their scales."""
    return packed_bytes(weights) + scale_bytes(weights, double_quant=double_quant)


def packed_bytes(weights: int) -> int:
    """Of weights in 4 bits, which are one tensor for each matrix."""
    return math.ceil(weights / 2)


def scale_bytes(weights: int, *, double_quant: bool) -> int:
    """Of their scales, which bitsandbytes keeps beside that tensor (``quant_state``)."""
    blocks = math.ceil(weights / NF4_BLOCK)
    return blocks + 4 * math.ceil(blocks / NF4_NESTED_BLOCK) if double_quant else 4 * blocks


def scale_formula(*, double_quant: bool) -> str:
    """What :func:`scale_bytes` sums up for Q weights."""
    if double_quant:
        return f"ceil(Q / {NF4_BLOCK}) + 4 * ceil(Q / {NF4_BLOCK * NF4_NESTED_BLOCK})"
    return f"4 * ceil(Q / {NF4_BLOCK})"
