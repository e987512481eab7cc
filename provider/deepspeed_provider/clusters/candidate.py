# SPDX-License-Identifier: Apache-2.0
"""One way to run a job on one kind of machine: what it needs, how long it takes, what it costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf

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
MOST_DECIMALS = 9


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


def slowdown(node_type: NodeType, nodes: int) -> float:
    """How many times longer a step takes than by its bandwidth."""
    return POOR_NETWORK_FACTOR if nodes > 1 and node_type.poor_network else 1.0


@dataclass(frozen=True, kw_only=True)
class Priced(ABC):
    """So many optimizer steps on nodes of a type, at a price: goals and limits look at nothing else."""

    hardware: Hardware
    node_type: NodeType
    spot: bool
    steps: int

    @property
    @abstractmethod
    def seconds_per_step(self) -> float:
        """With the slowdown."""

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

    @property
    def slowdown(self) -> float:
        """Of a step, where several nodes share a poor network."""
        return slowdown(self.node_type, self.nodes)

    @cached_property
    def training_hours(self) -> float:
        """Of all optimizer steps."""
        return self.steps * self.seconds_per_step / 3600

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
        most = constraints.max_usd_per_hour
        if most is not None and self.usd_per_hour > most:
            found.append(
                f"${above_text(self.usd_per_hour, most, 2)} an hour, above the limit of ${limit_text(most, 2)}"
            )
        most = constraints.budget_usd
        if most is not None and self.usd > most:
            found.append(f"over budget: ${above_text(self.usd, most, 2)} of ${limit_text(most, 2)}")
        most = constraints.deadline_hours
        if most is not None and self.hours > most:
            found.append(f"takes {above_text(self.hours, most, 1)} h, beyond the deadline of {limit_text(most, 1)} h")
        return found

    def excess(self, constraints: Constraints) -> float:
        """How many times the limit is reached that it breaks most; at most 1 where it keeps all."""
        limits = (
            (self.usd_per_hour, constraints.max_usd_per_hour),
            (self.usd, constraints.budget_usd),
            (self.hours, constraints.deadline_hours),
        )
        return max((reached / limit if limit else inf for reached, limit in limits if limit is not None), default=0.0)


def limit_text(limit: float, decimals: int) -> str:
    """A limit as it was given, with at least so many decimals."""
    whole, _, fraction = f"{limit:,.9f}".partition(".")
    return f"{whole}.{fraction.rstrip('0').ljust(decimals, '0')}"


def above_text(reached: float, limit: float, decimals: int) -> str:
    """What is above a limit, with as many decimals as it takes to see that."""
    while decimals < MOST_DECIMALS and round(reached, decimals) <= limit:
        decimals += 1
    return f"{reached:,.{decimals}f}"


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
        throughput=(pace or Pace(job)).throughput(options, hardware, slowdown(node_type, nodes)),
        steps=job.steps,
        spot=spot,
    )
