# SPDX-License-Identifier: Apache-2.0
"""How fast a job goes on each machine: what it works is counted once, and a bound costs no layout's throughput."""

from __future__ import annotations

from typing import Final

from deepspeed_provider.clusters.calibration import CALIBRATION
from deepspeed_provider.clusters.communication import ring_seconds
from deepspeed_provider.clusters.compute import micro_step_parts
from deepspeed_provider.clusters.gpus import Gpu
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Job
from deepspeed_provider.clusters.settings import Layout, layouts, options_for
from deepspeed_provider.clusters.throughput import Throughput, Work, throughput_of, work
from deepspeed_provider.sizing.options import Offload, TrainingOptions

# Sums of the same seconds in another order differ in their last digits.
ROUNDING: Final = 1 - 1e-9


class Pace:
    """Of one job. Raises :class:`SpecError` for LoRA targets that the model does not have."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._work: dict[tuple[object, ...], Work] = {}
        self._least: dict[tuple[str, int], float] = {}
        self._gradient_bytes: int | None = None
        self._found: dict[tuple[object, ...], Throughput] = {}

    def work(self, options: TrainingOptions) -> Work:
        """One serves all machines, micro-batches and offloads, with ZeRO or without."""
        key = (options.precision, options.zero_stage > 0, options.gradient_checkpointing)
        found = self._work.get(key)
        if found is None:
            found = self._work[key] = work(self._job.architecture, options)
        return found

    def throughput(self, options: TrainingOptions, hardware: Hardware) -> Throughput:
        """Machines that differ in nothing that these options use are as fast."""
        key = _used(options, hardware)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = throughput_of(self.work(options), options, hardware)
        return found

    def least_seconds(self, hardware: Hardware) -> float:
        """No step is shorter, whatever the layout: all compute, and several GPUs reduce their gradients.

        Offload and more communication come on top, waited for or beside these; no micro-batch computes faster
        than the whole batch at once, and none accumulates less.
        """
        computing = self._least_computing(hardware.gpu, hardware.world_size)
        if hardware.world_size == 1:
            return ROUNDING * computing
        reducing = self._reducing(hardware)
        share = CALIBRATION.exposed
        return ROUNDING * (share * (computing + reducing) + (1 - share) * max(computing, reducing))

    def _reducing(self, hardware: Hardware) -> float:
        if self._gradient_bytes is None:
            layout = layouts(self._job.options.method, alone=False, has_nvme=False)[0]
            options = options_for(self._job, layout, hardware.gpu, gpus_per_node=2, nodes=1, micro_batch_size=1)
            found = self.work(options).weights
            self._gradient_bytes = found.trained * found.widths.gradient
        return ring_seconds(self._gradient_bytes, hardware, CALIBRATION)

    def _least_computing(self, gpu: Gpu, world_size: int) -> float:
        key = (gpu.name, world_size)
        found = self._least.get(key)
        if found is None:
            kinds = _kinds(layouts(self._job.options.method, alone=world_size == 1, has_nvme=False))
            found = self._least[key] = min(self._computing(layout, gpu, world_size) for layout in kinds)
        return found

    def _computing(self, layout: Layout, gpu: Gpu, world_size: int) -> float:
        per_gpu = self._job.effective_batch_size // world_size
        options = options_for(self._job, layout, gpu, gpus_per_node=world_size, nodes=1, micro_batch_size=per_gpu)
        known = self.work(options)
        parts = micro_step_parts(known.num_layers, known.weights, options, gpu, known.token, CALIBRATION)
        return sum(parts.values())


def _used(options: TrainingOptions, hardware: Hardware) -> tuple[object, ...]:
    """All that the throughput depends on."""
    settings = (
        options.zero_stage,
        options.offload,
        options.offload_device,
        options.gradient_checkpointing,
        options.micro_batch_size,
    )
    machine = (hardware.gpu.name, hardware.gpus_per_node, hardware.nodes, hardware.intra_node_bytes_per_second)
    network = hardware.inter_node_bytes_per_second if hardware.nodes > 1 else 0
    if options.offload is Offload.NONE:
        return (*settings, *machine, network)
    return (*settings, *machine, network, hardware.cores_per_node, hardware.nvme_bytes_per_node)


def _kinds(found: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """One of each kind whose computation differs: stage 3 only adds to the lower stages'."""
    lowest: dict[tuple[bool, bool], Layout] = {}
    for layout in sorted(found, key=lambda layout: layout.zero_stage):
        lowest.setdefault((layout.zero_stage > 0, layout.gradient_checkpointing), layout)
    return tuple(lowest.values())
