# SPDX-License-Identifier: Apache-2.0
"""One way to run a job on one kind of machine: what it needs, how long it takes, what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Constraints, Headroom, Job, Objective
from deepspeed_provider.clusters.node_type import NodeType
from deepspeed_provider.clusters.settings import Layout, options_for
from deepspeed_provider.clusters.throughput import Throughput, throughput
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.estimate import MemoryEstimate, estimate
from deepspeed_provider.sizing.options import TrainingOptions

# From the request of a cluster until the ranks train: machines, runtime, libraries, model download.
STARTUP_HOURS = 12 / 60
# Databricks advises against training over several nodes with a poor network: what the measured
# bandwidth does not tell (shared links, no kernel bypass) is put into the time as this factor.
POOR_NETWORK_FACTOR = 1.25

NeedCache = dict[tuple[object, ...], "Need"]


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes on one GPU, one host and one host's NVMe."""

    gpu_bytes: int
    host_bytes: int
    nvme_bytes: int

    def shortfalls(self, node_type: NodeType, headroom: Headroom) -> Mapping[str, int]:
        """By how many bytes each resource is too small, with head-room; empty when all is there."""
        limits = {
            "GPU memory": (self.gpu_bytes, usable(node_type.gpu.memory_bytes, headroom.gpu)),
            "host memory": (self.host_bytes, usable(node_type.ram_bytes, headroom.host)),
            "NVMe": (self.nvme_bytes, usable(node_type.nvme_bytes, headroom.nvme)),
        }
        return {name: need - limit for name, (need, limit) in limits.items() if need > limit}


def usable(capacity_bytes: int, headroom: float) -> int:
    """What a plan may take of a resource."""
    return int(capacity_bytes * (1 - headroom))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A job on so many nodes of a type, with these options."""

    node_type: NodeType
    nodes: int
    layout: Layout
    architecture: Architecture
    options: TrainingOptions
    throughput: Throughput
    steps: int
    spot: bool

    @cached_property
    def memory(self) -> MemoryEstimate:
        """What it needs; counted when it is asked for."""
        return estimate(self.architecture, self.options)

    @property
    def drivers(self) -> int:
        """Nodes that are billed and do not train: a cluster of several workers has a driver of their type."""
        return 1 if self.nodes > 1 else 0

    @property
    def usd_per_hour(self) -> float:
        return (self.nodes + self.drivers) * self.node_type.usd_per_hour(spot=self.spot)

    @cached_property
    def training_hours(self) -> float:
        slow = POOR_NETWORK_FACTOR if self.nodes > 1 and self.node_type.poor_network else 1.0
        return slow * self.steps * self.throughput.seconds_per_step / 3600

    @property
    def hours(self) -> float:
        """Until the run ends, the cluster's start included."""
        return STARTUP_HOURS + self.training_hours

    @property
    def usd(self) -> float:
        """Price of the whole run."""
        return self.usd_per_hour * self.hours

    def goal(self, objective: Objective) -> float:
        """What is minimised, to a millionth."""
        return round(self.usd if objective is Objective.COST else self.hours, 6)

    def rank(self, objective: Objective) -> tuple[object, ...]:
        """Sorts candidates; equal ones by fewer nodes, a simpler layout, larger micro-batches, then by name."""
        return (
            self.goal(objective),
            self.nodes,
            self.layout.burden,
            round(self.usd + self.hours, 6),
            -self.options.micro_batch_size,
            self.node_type.cloud.value,
            self.node_type.node_type_id,
        )

    def broken_limits(self, constraints: Constraints) -> list[str]:
        """Which limits on price and time it breaks, in words."""
        found = []
        if constraints.max_usd_per_hour is not None and self.usd_per_hour > constraints.max_usd_per_hour:
            found.append(f"${self.usd_per_hour:,.2f} an hour, above the limit of ${constraints.max_usd_per_hour:,.2f}")
        if constraints.budget_usd is not None and self.usd > constraints.budget_usd:
            found.append(f"over budget: ${self.usd:,.2f} of ${constraints.budget_usd:,.2f}")
        if constraints.deadline_hours is not None and self.hours > constraints.deadline_hours:
            found.append(f"takes {self.hours:,.1f} h, beyond the deadline of {constraints.deadline_hours:,.1f} h")
        return found


def need(job: Job, options: TrainingOptions, cache: NeedCache) -> Need:
    """Memory of a job with these options. It depends on nothing of a node type but its number of GPUs."""
    key = (
        options.zero_stage,
        options.offload,
        options.offload_device,
        options.gradient_checkpointing,
        options.precision,
        options.gpus_per_node,
        options.nodes,
        options.micro_batch_size,
        options.gradient_accumulation_steps,
    )
    found = cache.get(key)
    if found is None:
        memory = estimate(job.architecture, options)
        found = cache[key] = Need(
            gpu_bytes=memory.gpu.total_bytes,
            host_bytes=memory.host.total_bytes,
            nvme_bytes=memory.nvme.total_bytes,
        )
    return found


def candidate(
    job: Job,
    node_type: NodeType,
    nodes: int,
    layout: Layout,
    micro_batch_size: int,
    *,
    spot: bool,
) -> Candidate:
    """This way to run the job, whether it fits or not."""
    options = options_for(
        job, layout, node_type.gpu, gpus_per_node=node_type.gpus, nodes=nodes, micro_batch_size=micro_batch_size
    )
    return Candidate(
        node_type=node_type,
        nodes=nodes,
        layout=layout,
        options=options,
        architecture=job.architecture,
        throughput=throughput(job.architecture, options, Hardware.of(node_type, nodes)),
        steps=job.steps,
        spot=spot,
    )
