# SPDX-License-Identifier: Apache-2.0
"""How a model's layers run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deepspeed_provider.sizing.architecture import Linear

FP32: Final = 4


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How the layers run: sizes, widths in bytes per element, and what is trained."""

    micro_batch_size: int
    sequence_length: int
    compute_width: int = 2  # of weights and matrix products
    stream_width: int = 2  # of embeddings, norms and the residual stream
    head_width: int = 2  # of the output head and the logits
    trains_base: bool = True
    adapter_width: int = FP32
    # By the matrix and not by its role: experts may be left without an adapter that dense layers beside them have.
    adapter_ranks: tuple[tuple[Linear, int], ...] = ()
    adapter_dropout: bool = False
    quantised: bool = False
    attention: str = "sdpa"  # eager, sdpa, flash
    loss: str = "full"  # full, kernel, chunked, fused
    holds_logits: bool = True  # whether the loop keeps the model's output through the backward pass

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.sequence_length
