# SPDX-License-Identifier: Apache-2.0
"""The ways to train on so many GPUs for one effective batch size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from deepspeed_provider.clusters.gpus import Gpu
from deepspeed_provider.clusters.job import Job
from deepspeed_provider.sizing.options import Method, Offload, OffloadDevice, Optimizer, Precision, TrainingOptions


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where model states live, and what is recomputed."""

    zero_stage: int
    offload: Offload
    offload_device: OffloadDevice
    gradient_checkpointing: bool

    @cached_property
    def burden(self) -> tuple[int, int, int, bool]:
        """Smaller is simpler: less offload, a lower stage, no recomputation."""
        order = list(Offload).index(self.offload)
        return order, int(self.offload_device is OffloadDevice.NVME), self.zero_stage, self.gradient_checkpointing

    def __str__(self) -> str:
        moved = "" if self.offload is Offload.NONE else f", offload {self.offload} to {self.offload_device}"
        return f"ZeRO {self.zero_stage}{moved}{', checkpointing' if self.gradient_checkpointing else ''}"


_ALONE = ((0, Offload.NONE), (1, Offload.NONE), (2, Offload.OPTIMIZER), (3, Offload.OPTIMIZER), (3, Offload.ALL))
_TOGETHER = (
    (1, Offload.NONE),
    (2, Offload.NONE),
    (3, Offload.NONE),
    (2, Offload.OPTIMIZER),
    (3, Offload.OPTIMIZER),
    (3, Offload.ALL),
)


@lru_cache(maxsize=64)
def layouts(method: Method, *, alone: bool, has_nvme: bool, optimizer: Optimizer) -> tuple[Layout, ...]:
    """All layouts for one GPU (``alone``) or several. QLoRA's 4-bit weights do not go with stage 3,
    and only AdamW's states leave the GPU.

    Adapters always go with ZeRO: without, they stay in fp32, which is slower than stage 1. In some shapes it would
    need up to about half a GiB less, which is given up.
    """
    found = []
    for stage, offload in _ALONE if alone else _TOGETHER:
        if (method is Method.QLORA and stage == 3) or (method is not Method.FULL and stage == 0):
            continue
        if offload is not Offload.NONE and not steps_on_cpu(optimizer):
            continue
        devices = [OffloadDevice.CPU]
        if offload is not Offload.NONE and stage == 3 and has_nvme:
            devices.append(OffloadDevice.NVME)
        found += [
            Layout(zero_stage=stage, offload=offload, offload_device=device, gradient_checkpointing=checkpointing)
            for device in devices
            for checkpointing in (False, True)
        ]
    return tuple(found)


def steps_on_cpu(optimizer: Optimizer) -> bool:
    """Whether its states can be offloaded: DeepSpeed's step on the CPU is Adam's, and it refuses a training's own other
    optimizer there; bitsandbytes' 8-bit and paged optimizers step on the GPU only."""
    return optimizer is Optimizer.ADAMW


def precision(gpu: Gpu) -> Precision:
    """bf16 where the GPU computes in it, else fp16 with loss scaling."""
    return Precision.BF16 if gpu.bf16 else Precision.FP16


@lru_cache(maxsize=1024)
def micro_batch_sizes(per_gpu: int) -> tuple[int, ...]:
    """Divisors of the sequences that one GPU works through in a step, ascending."""
    small = [size for size in range(1, int(per_gpu**0.5) + 1) if per_gpu % size == 0]
    return tuple(sorted({*small, *(per_gpu // size for size in small)}))


def sequences_per_gpu(job: Job, world_size: int) -> int | None:
    """Of one optimizer step; None where the effective batch does not divide over so many GPUs."""
    return None if job.effective_batch_size % world_size else job.effective_batch_size // world_size


def options_for(
    job: Job, layout: Layout, gpu: Gpu, *, gpus_per_node: int, nodes: int, micro_batch_size: int
) -> TrainingOptions:
    """The job's options with all that the search chooses."""
    per_gpu = job.effective_batch_size // (gpus_per_node * nodes)
    return job.options.model_copy(
        update={
            "precision": precision(gpu),
            "zero_stage": layout.zero_stage,
            "offload": layout.offload,
            "offload_device": layout.offload_device,
            "gradient_checkpointing": layout.gradient_checkpointing,
            "gpus_per_node": gpus_per_node,
            "nodes": nodes,
            "micro_batch_size": micro_batch_size,
            "gradient_accumulation_steps": per_gpu // micro_batch_size,
            # As the generated configuration has it on GPUs.
            "overlap_comm": True,
        }
    )


def node_counts(job: Job, gpus: int, *, least: int, most: int) -> Iterator[int]:
    """Numbers of nodes over which the effective batch divides."""
    for nodes in range(least, most + 1):
        if sequences_per_gpu(job, gpus * nodes) is not None:
            yield nodes
