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


def nf4_bytes(weights: int, *, double_quant: bool) -> int:
    """Packed weights (half a byte each) with their scales."""
    blocks = math.ceil(weights / NF4_BLOCK)
    scales = blocks + 4 * math.ceil(blocks / NF4_NESTED_BLOCK) if double_quant else 4 * blocks
    return math.ceil(weights / 2) + scales
