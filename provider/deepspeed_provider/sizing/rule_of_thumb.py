# SPDX-License-Identifier: Apache-2.0
"""Bytes per parameter, as guides give them: model states only, nothing that depends on the batch.

Each guide's numbers follow from a few assumptions, which are named here; docs/memory.md sets them beside
estimates and measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deepspeed_provider.sizing.options import Optimizer, Precision
from deepspeed_provider.sizing.states import OPTIMIZERS, PRECISIONS

GB: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a guide takes for granted.

    Attributes:
        precision: of weights and gradients, and of the optimizer's states.
        counts_master_weights: whether the optimizer's fp32 copy of the weights is counted.
        adapter_precision: of LoRA's adapters, their gradients and states.
        adapter_share: adapters' parameters for each of the model's.
        quantized_bits: of a 4-bit weight, its scales included where the guide counts them.
    """

    precision: Precision
    counts_master_weights: bool
    adapter_precision: Precision
    adapter_share: float
    quantized_bits: float
    optimizer: Optimizer = Optimizer.ADAMW


# The article "Introducing the DeepSpeed Distributor on Databricks" (2024): 2 + 2 + 8 bytes for a full
# fine-tune; for LoRA 0.4 + 0.4 + 0.8 bits of adapters, their gradients and states, as an adapter for every
# fortieth parameter has in bf16 throughout; NF4 without its scales.
ARTICLE: Final = Assumptions(
    precision=Precision.BF16,
    counts_master_weights=False,
    adapter_precision=Precision.PURE_BF16,
    adapter_share=1 / 40,
    quantized_bits=4,
)
# The ZeRO paper's mixed precision, which the article's table of ZeRO stages follows: 2 + 2 + 12 bytes.
ZERO_PAPER: Final = Assumptions(
    precision=Precision.BF16,
    counts_master_weights=True,
    adapter_precision=Precision.BF16,
    adapter_share=0,
    quantized_bits=4,
)


def weights_bytes(parameters: float, precision: Precision) -> float:
    """Of one copy of the weights."""
    return parameters * PRECISIONS[precision].weight


def full_bytes(parameters: float, assumed: Assumptions, *, zero_stage: int = 0, gpus: int = 1) -> float:
    """Model states on each GPU when all weights are trained (Rajbhandari et al. 2020, section 3.1)."""
    widths = PRECISIONS[assumed.precision]
    optimizer = _optimizer_bytes(assumed.precision, assumed.optimizer)
    optimizer += widths.master if assumed.counts_master_weights else 0
    per_parameter = (widths.weight, widths.gradient, optimizer)
    divided_from = (3, 2, 1)
    return parameters * sum(
        width / (gpus if zero_stage >= stage else 1) for width, stage in zip(per_parameter, divided_from, strict=True)
    )


def lora_bytes(parameters: float, assumed: Assumptions) -> float:
    """Frozen weights with their adapters, those adapters' gradients and states."""
    return weights_bytes(parameters, assumed.precision) + _adapters_bytes(parameters, assumed)


def qlora_bytes(parameters: float, assumed: Assumptions) -> float:
    """The same with all weights in 4 bits."""
    return parameters * assumed.quantized_bits / 8 + _adapters_bytes(parameters, assumed)


def _adapters_bytes(parameters: float, assumed: Assumptions) -> float:
    widths = PRECISIONS[assumed.adapter_precision]
    each = widths.weight + widths.gradient + _optimizer_bytes(assumed.adapter_precision, assumed.optimizer)
    return parameters * assumed.adapter_share * each


def _optimizer_bytes(precision: Precision, optimizer: Optimizer) -> int:
    return OPTIMIZERS[optimizer].count * PRECISIONS[precision].state
