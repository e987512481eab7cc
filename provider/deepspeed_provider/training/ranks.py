# SPDX-License-Identifier: Apache-2.0
"""Where this process stands among the ranks, its device, and the process group."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

# The others wait in a collective while rank 0 saves, verifies and uploads the model; torch's own limit
# of 10 minutes (NCCL) would end a long upload. A rank that dies is noticed by torchrun, not by this.
COLLECTIVE_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Identity of this process as torchrun told it, and the device it works on (``cpu`` or ``cuda:N``)."""

    rank: int
    local_rank: int
    world_size: int
    use_gpu: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, use_gpu: bool) -> Rank:
        return cls(
            rank=int(environment.get("RANK", "0")),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            world_size=int(environment.get("WORLD_SIZE", "1")),
            use_gpu=use_gpu,
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> str:
        return f"cuda:{self.local_rank}" if self.use_gpu else "cpu"


def choose_accelerator(use_gpu: bool) -> None:
    """Tell DeepSpeed what to run on; must come before its first import (transformers may import it too)."""
    if use_gpu:
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["DS_IGNORE_CUDA_DETECTION"] = "1"


def join_process_group(rank: Rank) -> None:
    """Start torch.distributed for this rank: NCCL on GPUs, gloo on CPUs."""
    import torch
    import torch.distributed

    if rank.use_gpu:
        torch.cuda.set_device(rank.local_rank)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if rank.use_gpu else "gloo", timeout=COLLECTIVE_TIMEOUT)


def leave_process_group() -> None:
    """End torch.distributed once all ranks are here: a rank that leaves early looks like a failure to the others."""
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def start_deepspeed(rank: Rank) -> None:
    """DeepSpeed's communication on top of our process group, without compiling anything on CPUs.

    On a CPU, DeepSpeed 0.19 builds a shared-memory operator at its first start: over a minute, and
    a failure where there is no g++. Only its inference all-reduce uses that operator; training goes
    through gloo anyway, so it is marked as unavailable.
    """
    join_process_group(rank)
    import deepspeed

    if not rank.use_gpu:
        compatible = getattr(deepspeed.ops, "__compatible_ops__", None)
        if isinstance(compatible, dict):
            compatible["deepspeed_shm_comm"] = False
            compatible["deepspeed_ccl_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)


def seed_everything(seed: int) -> None:
    """The same seed in every rank: LoRA's initial weights must be equal everywhere."""
    import random

    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def peak_memory_bytes(use_gpu: bool) -> int | None:
    """Peak of what this rank reserved on its GPU, or of its resident memory on a CPU."""
    if use_gpu:
        torch = sys.modules.get("torch")
        return None if torch is None or not torch.cuda.is_available() else int(torch.cuda.max_memory_reserved())
    # ru_maxrss is in KiB on Linux, in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def sum_over_ranks(*values: float, device: str) -> list[float]:
    """Each value summed over all ranks, in double precision."""
    import torch
    import torch.distributed

    tensor: Any = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def largest_over_ranks(value: float, *, device: str) -> float:
    """The largest of all ranks' values."""
    import torch
    import torch.distributed

    tensor: Any = torch.tensor(value, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return float(tensor)
