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


@dataclass(frozen=True, kw_only=True)
class Fragmentation:
    """What the caching allocator holds beyond its tensors: ``fixed_bytes``, left over from loading, and
    a share of what is made and freed in each step."""

    fixed_bytes: int
    moving_share: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All calibrated numbers.

    Attributes:
        in_place: weights that stay in place leave holes only where a step's tensors do not fit into
            each other's.
        gathered: gathered parameters come and go on a stream of their own, and a block that two
            streams have used waits for both.
        changing_lengths: where batches are padded to their own longest sequence, each step's logits
            have another size, and the blocks of the steps before do not fit them; share of the
            logits' and the loss's peak.
        cuda_context_bytes: beside a process's allocator: kernels' code, local memory, libraries' own buffers.
        nccl_bytes: communicators' channels and buffers, once there is more than one GPU.
    """

    in_place: Fragmentation
    gathered: Fragmentation
    changing_lengths: float
    cuda_context_bytes: int
    nccl_bytes: int


CALIBRATION: Final = Calibration(
    in_place=Fragmentation(fixed_bytes=375 * MIB, moving_share=0),
    gathered=Fragmentation(fixed_bytes=1125 * MIB, moving_share=0.2),
    changing_lengths=2,
    cuda_context_bytes=975 * MIB,
    nccl_bytes=1800 * MIB,
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What of one step the overhead depends on.

    Attributes:
        moving_bytes: made and freed in each step, at the peak.
        logits_bytes: of that, for logits and loss.
        gathers: whether parameters are gathered for use (ZeRO 3 on more than one GPU).
        lengths_change: whether batches differ in length.
        world_size: number of GPUs.
    """

    moving_bytes: int
    logits_bytes: int
    gathers: bool
    lengths_change: bool
    world_size: int


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Bytes on one GPU outside its tensors."""

    fragmentation: int
    cuda_context: int
    nccl: int


def overhead(step: Step, calibration: Calibration = CALIBRATION) -> Overhead:
    """Fragmentation, context and communication of one GPU."""
    kind = calibration.gathered if step.gathers else calibration.in_place
    changing = calibration.changing_lengths * step.logits_bytes if step.lengths_change else 0
    return Overhead(
        fragmentation=kind.fixed_bytes + round(kind.moving_share * step.moving_bytes + changing),
        cuda_context=calibration.cuda_context_bytes,
        nccl=calibration.nccl_bytes if step.world_size > 1 else 0,
    )
