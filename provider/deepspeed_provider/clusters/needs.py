# SPDX-License-Identifier: Apache-2.0
"""What every layout of a job needs on hardware of every shape, each number counted once for a whole search.

Nothing of a machine but its numbers of GPUs and nodes decides what a layout needs: fp16 and bf16 take the same
bytes (tests/sizing/test_totals.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from deepspeed_provider.clusters.candidate import Need, Room
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Job
from deepspeed_provider.clusters.settings import Layout, layouts, micro_batch_sizes, options_for
from deepspeed_provider.sizing.gpu import mode
from deepspeed_provider.sizing.host import host_parts, nvme_parts
from deepspeed_provider.sizing.options import OffloadDevice, TrainingOptions
from deepspeed_provider.sizing.totals import Activations, GpuTotals, activations
from deepspeed_provider.sizing.weights import Weights, weights

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """How hardware comes closest to holding a job that it cannot hold."""

    nodes: int
    layout: Layout
    micro_batch_size: int
    resource: str
    missing_bytes: int

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        missing = f"{self.missing_bytes / GIB:.1f} GiB of {self.resource}"
        return f"{missing} too little at best ({nodes}, {self.layout}, micro-batch {self.micro_batch_size})"


class Needs:
    """Of one job. Raises :class:`SpecError` for LoRA targets that the model does not have."""

    def __init__(self, job: Job) -> None:
        self._counted = _Counted(job)
        self._shapes: dict[tuple[int, int, bool], tuple[LayoutNeeds, ...]] = {}
        self._layouts: dict[tuple[Layout, int, int], LayoutNeeds] = {}

    def of(self, hardware: Hardware) -> tuple[LayoutNeeds, ...]:
        """Each layout's needs there, the simplest layout first."""
        has_nvme = hardware.nvme_bytes_per_node > 0
        key = (hardware.gpus_per_node, hardware.nodes, has_nvme)
        found = self._shapes.get(key)
        if found is None:
            options = self._counted.job.options
            tried = layouts(
                options.method, alone=hardware.world_size == 1, has_nvme=has_nvme, optimizer=options.optimizer
            )
            found = self._shapes[key] = tuple(self._of_layout(layout, hardware) for layout in tried)
        return found

    def _of_layout(self, layout: Layout, hardware: Hardware) -> LayoutNeeds:
        key = (layout, hardware.gpus_per_node, hardware.nodes)
        if key not in self._layouts:
            self._layouts[key] = LayoutNeeds(self._counted, layout, hardware)
        return self._layouts[key]


class _Counted:
    """Numbers that several layouts share."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._weights: dict[bool, Weights] = {}
        self._gpus: dict[tuple[object, ...], GpuTotals] = {}
        self._hosts: dict[tuple[object, ...], int] = {}
        self._activations: dict[tuple[bool, bool, int], tuple[Activations, ...]] = {}

    def weights(self, options: TrainingOptions) -> Weights:
        """One copy serves all options with ZeRO, another those without."""
        key = options.zero_stage > 0
        if key not in self._weights:
            self._weights[key] = weights(self.job.architecture, options)
        return self._weights[key]

    def gpu(self, options: TrainingOptions) -> GpuTotals:
        """One serves all micro-batches, devices of offload and ways to spread the same GPUs over nodes."""
        states = (options.zero_stage, options.offload, options.world_size)
        key = (*states, options.gradient_checkpointing)
        if key not in self._gpus:
            twin = self._gpus.get((*states, not options.gradient_checkpointing))
            self._gpus[key] = GpuTotals(self.job.architecture, self.weights(options), options, twin)
        return self._gpus[key]

    def activations(self, options: TrainingOptions, micro_batch_size: int) -> tuple[Activations, ...]:
        key = (options.zero_stage > 0, options.gradient_checkpointing, micro_batch_size)
        found = self._activations.get(key)
        if found is None:
            sized = options.model_copy(update={"micro_batch_size": micro_batch_size})
            how = mode(self.job.architecture, self.weights(options), sized)
            checkpointing = options.gradient_checkpointing
            found = self._activations[key] = activations(self.job.architecture, how, checkpointing=checkpointing)
        return found

    def host_bytes(self, options: TrainingOptions, *, accumulates: bool) -> int:
        """Recomputation happens on the GPU, and micro-batches are small: neither is asked for."""
        key = (
            options.zero_stage,
            options.offload,
            options.offload_device,
            options.gpus_per_node,
            options.nodes,
            accumulates,
        )
        found = self._hosts.get(key)
        if found is None:
            if (options.gradient_accumulation_steps > 1) is not accumulates:
                options = options.model_copy(update={"gradient_accumulation_steps": 2 if accumulates else 1})
            found = self._hosts[key] = sum(part.bytes for part in host_parts(self.weights(options), options))
        return found


class LayoutNeeds:
    """Of one layout on hardware of one shape, by micro-batch, accumulated to the effective batch."""

    def __init__(self, counted: _Counted, layout: Layout, hardware: Hardware) -> None:
        self.layout = layout
        self._counted = counted
        self._per_gpu = counted.job.effective_batch_size // hardware.world_size
        self._options = options_for(
            counted.job,
            layout,
            hardware.gpu,
            gpus_per_node=hardware.gpus_per_node,
            nodes=hardware.nodes,
            micro_batch_size=1,
        )
        self._totals = counted.gpu(self._options)
        self.least_gpu_bytes = self._totals.least_bytes
        self._nvme = 0
        if layout.offload_device is OffloadDevice.NVME:
            self._nvme = sum(part.bytes for part in nvme_parts(counted.weights(self._options), self._options))
        self._hosts: dict[bool, int] = {}
        self._gpu: dict[int, int] = {}

    def need(self, micro_batch_size: int) -> Need:
        """With this micro-batch."""
        return Need(
            gpu_bytes=self._gpu_bytes(micro_batch_size),
            host_bytes=self._host_bytes(micro_batch_size),
            nvme_bytes=self._nvme,
        )

    def largest_that_fits(self, room: Room) -> int | None:
        """The largest micro-batch; with it training is fastest.

        Memory grows with the micro-batch, except that the whole batch at once accumulates nothing.
        """
        if self._nvme > room.nvme_bytes:
            return None
        *smaller, whole = micro_batch_sizes(self._per_gpu)
        if self._host_bytes(whole) <= room.host_bytes and self._gpu_bytes(whole) <= room.gpu_bytes:
            return whole
        # The host holds the same for all micro-batches that are accumulated.
        if not smaller or self._host_bytes(1) > room.host_bytes:
            return None
        low, high = 0, len(smaller)
        while low < high:
            middle = (low + high) // 2
            if self._gpu_bytes(smaller[middle]) <= room.gpu_bytes:
                low = middle + 1
            else:
                high = middle
        return smaller[low - 1] if low else None

    def misses_by(self, room: Room, most: float) -> tuple[int, int] | None:
        """(bytes that are missing of the scarcest resource at best, with which micro-batch), if not above ``most``."""
        found = None
        if self.least_gpu_bytes - room.gpu_bytes > most:
            return None
        for size in {1, self._per_gpu}:
            missing = self._gpu_bytes(size) - room.gpu_bytes
            if missing <= most:
                missing = max(missing, self._host_bytes(size) - room.host_bytes, self._nvme - room.nvme_bytes)
                if missing <= most:
                    found, most = (missing, size), missing
        return found

    def _gpu_bytes(self, micro_batch_size: int) -> int:
        found = self._gpu.get(micro_batch_size)
        if found is None:
            moments = self._counted.activations(self._options, micro_batch_size)
            accumulates = micro_batch_size < self._per_gpu
            found = self._gpu[micro_batch_size] = self._totals.total_bytes(moments, accumulates=accumulates)
        return found

    def _host_bytes(self, micro_batch_size: int) -> int:
        accumulates = micro_batch_size < self._per_gpu
        found = self._hosts.get(accumulates)
        if found is None:
            found = self._hosts[accumulates] = self._counted.host_bytes(self._options, accumulates=accumulates)
        return found


def fitting(needs: Needs, hardware: Hardware, room: Room) -> Iterator[tuple[Layout, int]]:
    """Each layout that fits, with its largest micro-batch; recomputation only where it makes that larger."""
    without: dict[Layout, int] = {}
    for of_layout in needs.of(hardware):
        if of_layout.least_gpu_bytes > room.gpu_bytes:
            continue
        layout, size = of_layout.layout, of_layout.largest_that_fits(room)
        if size is None:
            continue
        if not layout.gradient_checkpointing:
            without[layout] = size
        elif without.get(replace(layout, gradient_checkpointing=False)) == size:
            continue
        yield layout, size


def nearest(needs: Needs, hardware: Hardware, room: Room) -> Shortage | None:
    """Of all layouts the one that misses least; None where one fits."""
    least, closest = inf, None
    # The last are the lightest; of equal ones the simplest stays.
    for of_layout in reversed(needs.of(hardware)):
        found = of_layout.misses_by(room, least)
        if found is not None:
            least, closest = found[0], (of_layout, found[1])
    if closest is None or least <= 0:
        return None
    of_layout, micro_batch_size = closest
    missing = of_layout.need(micro_batch_size).shortfalls(room)
    resource = max(missing, key=lambda name: missing[name])
    return Shortage(
        nodes=hardware.nodes,
        layout=of_layout.layout,
        micro_batch_size=micro_batch_size,
        resource=resource,
        missing_bytes=missing[resource],
    )
