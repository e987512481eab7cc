# SPDX-License-Identifier: Apache-2.0
"""What is to be trained, on which machines it may run, and what "best" means."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from deepspeed_provider.clusters.node_type import Cloud
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.options import TrainingOptions


class Objective(StrEnum):
    """What is minimised."""

    COST = "cost"  # price of the whole run
    TIME = "time"  # hours until it ends


@dataclass(frozen=True, kw_only=True)
class Job:
    """One fine-tune, without the machines.

    Attributes:
        options: how it trains (method, optimizer, sequence length, adapters, loss). What the search
            chooses (precision, ZeRO stage, offload, checkpointing, micro-batch, accumulation, GPUs) is
            not read from it.
        tokens: of the whole run, padding included.
        effective_batch_size: sequences per optimizer step, over all GPUs.
    """

    architecture: Architecture
    options: TrainingOptions
    tokens: int
    effective_batch_size: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return math.ceil(self.tokens / (self.effective_batch_size * self.options.sequence_length))


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """Shares of a resource that a plan leaves free."""

    gpu: float = 0.05
    host: float = 0.10
    nvme: float = 0.10


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Where a run may go and what it may take; None and empty mean no limit.

    Attributes:
        families: beginnings of node type ids, such as ``p4d`` or ``Standard_ND``.
        min_nodes, max_nodes: workers; the driver of a cluster of several is not among them.
        max_usd_per_hour: of the whole cluster, driver included.
        spot: price spot machines.
    """

    clouds: frozenset[Cloud] = frozenset()
    regions: frozenset[str] = frozenset()
    node_type_ids: frozenset[str] = frozenset()
    families: tuple[str, ...] = ()
    min_nodes: int = 1
    max_nodes: int = 4
    max_usd_per_hour: float | None = None
    budget_usd: float | None = None
    deadline_hours: float | None = None
    spot: bool = False
    min_compute_capability: tuple[int, int] | None = None
    headroom: Headroom = Headroom()

    @property
    def limited(self) -> bool:
        """In price or time."""
        return self != self.without_limits()

    def without_limits(self) -> Constraints:
        """On price and time."""
        return replace(self, max_usd_per_hour=None, budget_usd=None, deadline_hours=None)
