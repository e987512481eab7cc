# SPDX-License-Identifier: Apache-2.0
"""One way to run a job on one kind of machine: what it needs, how long it takes, what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Constraints, Headroom, Job, Objective
from deepspeed_provider.clusters.node_type import NodeType
from deepspeed_provider.clusters.pace import Pace
from deepspeed_provider.clusters.settings import Layout, options_for
from deepspeed_provider.clusters.throughput import Throughput
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.estimate import MemoryEstimate, estimate
from deepspeed_provider.sizing.options import TrainingOptions

# From the request of a cluster until the ranks train: machines, runtime, libraries, model download.
STARTUP_HOURS = 12 / 60
# Databricks advises against training over several nodes with a poor network: what the measured
# bandwidth does not tell (shared links, no kernel bypass) is put into the time as this factor.
POOR_NETWORK_FACTOR = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Bytes that a plan may take of one GPU, one host and one host's NVMe."""

    gpu_bytes: int
    host_bytes: int
    nvme_bytes: int

    @classmethod
    def of(cls, hardware: Hardware, headroom: Headroom) -> Room:
        """What the head-room leaves."""
        return cls(
            gpu_bytes=int(hardware.gpu.memory_bytes * (1 - headroom.gpu)),
            host_bytes=int(hardware.ram_bytes_per_node * (1 - headroom.host)),
            nvme_bytes=int(hardware.nvme_bytes_per_node * (1 - headroom.nvme)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Bytes on one GPU, one host and one host's NVMe."""

    gpu_bytes: int
    host_bytes: int
    nvme_bytes: int

    def shortfalls(self, room: Room) -> Mapping[str, int]:
        """By how many bytes each resource is too small; empty when all is there."""
        missing = {
            "GPU memory": self.gpu_bytes - room.gpu_bytes,
            "host memory": self.host_bytes - room.host_bytes,
            "NVMe": self.nvme_bytes - room.nvme_bytes,
        }
        return {name: size for name, size in missing.items() if size > 0}


def need(job: Job, options: TrainingOptions) -> Need:
    """Of a job with these options, from the whole estimate."""
    memory = estimate(job.architecture, options)
    return Need(
        gpu_bytes=memory.gpu.total_bytes, host_bytes=memory.host.total_bytes, nvme_bytes=memory.nvme.total_bytes
    )


@dataclass(frozen=True, kw_only=True)
class Priced:
    """So many optimizer steps on nodes of a type, at a price: goals and limits look at nothing else."""

    hardware: Hardware
    node_type: NodeType
    spot: bool
    steps: int

    @property
    def seconds_per_step(self) -> float:
        raise NotImplementedError

    @property
    def nodes(self) -> int:
        return self.hardware.nodes

    @property
    def drivers(self) -> int:
        """Nodes that are billed and do not train: a cluster of several workers has a driver of their type."""
        return 1 if self.nodes > 1 else 0

    @cached_property
    def usd_per_hour(self) -> float:
        """Of the whole cluster. A spot cluster's driver stays on demand, where it is sold so."""
        driver_on_spot = self.spot and not self.node_type.priced()
        workers = self.nodes * self.node_type.usd_per_hour(spot=self.spot)
        return workers + self.drivers * self.node_type.usd_per_hour(spot=driver_on_spot)

    @cached_property
    def training_hours(self) -> float:
        """Of all optimizer steps, slowed down where several nodes share a poor network."""
        slow = POOR_NETWORK_FACTOR if self.nodes > 1 and self.node_type.poor_network else 1.0
        return slow * self.steps * self.seconds_per_step / 3600

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


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A job on given hardware, with these options."""

    hardware: Hardware
    layout: Layout
    architecture: Architecture
    options: TrainingOptions
    throughput: Throughput
    steps: int

    @property
    def seconds_per_step(self) -> float:
        return self.throughput.seconds_per_step

    @cached_property
    def memory(self) -> MemoryEstimate:
        """What it needs; counted when it is asked for."""
        return estimate(self.architecture, self.options)


@dataclass(frozen=True, kw_only=True)
class Candidate(Setup, Priced):
    """A job on so many nodes of a type, with these options."""

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
            self.node_type.region,
        )


def candidate(
    job: Job,
    node_type: NodeType,
    nodes: int,
    layout: Layout,
    micro_batch_size: int,
    *,
    spot: bool,
    pace: Pace | None = None,
) -> Candidate:
    """This way to run the job, whether it fits or not. ``pace``: of the same job, where many are asked for."""
    options = options_for(
        job, layout, node_type.gpu, gpus_per_node=node_type.gpus, nodes=nodes, micro_batch_size=micro_batch_size
    )
    hardware = Hardware.of(node_type, nodes)
    return Candidate(
        hardware=hardware,
        node_type=node_type,
        layout=layout,
        options=options,
        architecture=job.architecture,
        throughput=(pace or Pace(job)).throughput(options, hardware),
        steps=job.steps,
        spot=spot,
    )
