# SPDX-License-Identifier: Apache-2.0
"""What is there beside the tensors: the allocator's fragmentation, the CUDA context, communication.

These are the only calibrated numbers of the room. docs/accuracy.md says on which measurements, and
how an estimate does on a source that its calibration has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 2**20

# cuBLAS keeps a workspace for each handle and stream: 8.125 MiB before Hopper; the thread that runs
# forward and the one that runs backward have one each.
CUBLAS_WORKSPACE_BYTES: Final = 2 * 8_519_680

# Beside a process's allocator: kernels' code and local memory. 141 MiB on a T4, 400 to 600 on later GPUs.
CUDA_CONTEXT_BYTES: Final = 600 * MIB
# Communicators' channels and buffers, once there is more than one GPU.
NCCL_BYTES: Final = 600 * MIB


@dataclass(frozen=True, kw_only=True)
class Fragmentation:
    """What the caching allocator holds beyond its tensors: ``fixed_bytes``, left over from loading, and
    a share of what is made and freed in each step."""

    fixed_bytes: int
    moving_share: float


# Weights that stay in place leave holes only where a step's tensors do not fit into each other's.
IN_PLACE: Final = Fragmentation(fixed_bytes=500 * MIB, moving_share=0.15)
# Gathered parameters come and go on a stream of their own, and a block that two streams have used
# waits for both.
GATHERED: Final = Fragmentation(fixed_bytes=1000 * MIB, moving_share=0.30)
# Batches padded to their own longest sequence: each step's logits have another size, and the blocks
# of the steps before do not fit them. Share of the logits' and the loss's peak.
CHANGING_LENGTHS: Final = 1.5


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Bytes on one GPU outside its tensors."""

    fragmentation: int
    cuda_context: int
    nccl: int


def overhead(*, moving_bytes: int, logits_bytes: int, gathers: bool, lengths_change: bool, world_size: int) -> Overhead:
    """``moving_bytes``: what is made and freed in each step, at its peak, ``logits_bytes`` of it for the loss."""
    kind = GATHERED if gathers else IN_PLACE
    changing = CHANGING_LENGTHS * logits_bytes if lengths_change else 0
    return Overhead(
        fragmentation=kind.fixed_bytes + round(kind.moving_share * moving_bytes + changing),
        cuda_context=CUDA_CONTEXT_BYTES,
        nccl=NCCL_BYTES if world_size > 1 else 0,
    )
