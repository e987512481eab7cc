# SPDX-License-Identifier: Apache-2.0
"""What is there beside the tensors: the allocator's fragmentation, the CUDA context, communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 2**20

# cuBLAS keeps a workspace for each handle and stream: 8.125 MiB before Hopper; the thread that runs
# forward and the one that runs backward have one each.
CUBLAS_WORKSPACE_BYTES: Final = 2 * 8_519_680

# Share of the activations and temporaries (not of what stays in place, such as weights) that the
# caching allocator holds beyond what is allocated at the peak.
FRAGMENTATION: Final = 0.15

CUDA_CONTEXT_BYTES: Final = 450 * MIB
NCCL_BYTES: Final = 350 * MIB


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Bytes on one GPU outside its tensors."""

    fragmentation: int
    cuda_context: int
    nccl: int


def overhead(*, moving_bytes: int, world_size: int) -> Overhead:
    """``moving_bytes``: what is made and freed in each step, at its peak."""
    return Overhead(
        fragmentation=round(FRAGMENTATION * moving_bytes),
        cuda_context=CUDA_CONTEXT_BYTES,
        nccl=NCCL_BYTES if world_size > 1 else 0,
    )
