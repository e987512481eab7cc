# SPDX-License-Identifier: Apache-2.0
"""How fast a job goes on each machine: what it works is counted once, and bounds cost less than throughput."""

from __future__ import annotations

from functools import cached_property
from typing import Final

from deepspeed_provider.clusters.calibration import CALIBRATION
from deepspeed_provider.clusters.communication import ring_seconds, whole_weights
from deepspeed_provider.clusters.compute import micro_step_parts
from deepspeed_provider.clusters.gpus import Gpu
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Job
from deepspeed_provider.clusters.offload import offload_time
from deepspeed_provider.clusters.settings import Layout, layouts, options_for
from deepspeed_provider.clusters.throughput import Throughput, Work, slowed, throughput_of, work
from deepspeed_provider.sizing.options import Offload, TrainingOptions
from deepspeed_provider.sizing.weights import weights

# Sums of the same seconds in another order differ in their last digits.
ROUNDING: Final = 1 - 1e-9


class Pace:
    """Of one job. Raises :class:`SpecError` for LoRA targets that the model does not have."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._work: dict[tuple[object, ...], Work] = {}
        self._least: dict[tuple[object, ...], float] = {}
        self._computing: dict[tuple[object, ...], float] = {}
        self._waiting: dict[tuple[object, ...], float] = {}
        self._found: dict[tuple[object, ...], Throughput] = {}

    def work(self, options: TrainingOptions) -> Work:
        """One serves all machines, micro-batches and offloads, with ZeRO or without."""
        key = (options.precision, options.zero_stage > 0, options.gradient_checkpointing)
        found = self._work.get(key)
        if found is None:
            found = self._work[key] = work(self._job.architecture, options)
        return found

    def throughput(self, options: TrainingOptions, hardware: Hardware, slowdown: float = 1.0) -> Throughput:
        """Machines that differ in nothing that these options use are as fast."""
        key = (slowdown, *_used(options, hardware))
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = slowed(throughput_of(self.work(options), options, hardware), slowdown)
        return found

    def least_seconds(self, hardware: Hardware) -> float:
        """No step is shorter, whatever the layout and the micro-batch.

        None computes faster than the whole batch at once, which also accumulates least; offload comes on top.
        """
        key = _machine(hardware)
        found = self._least.get(key)
        if found is None:
            found = self._least[key] = self._least_of_all(hardware)
        return found

    def _least_of_all(self, hardware: Hardware) -> float:
        whole = self._job.effective_batch_size // hardware.world_size
        options = self._job.options
        tried = layouts(options.method, alone=hardware.world_size == 1, has_nvme=False, optimizer=options.optimizer)
        # Recomputation is never faster.
        kinds = {layout.zero_stage > 0: layout for layout in tried if not layout.gradient_checkpointing}
        computing = min(self._least_computing(layout, hardware, whole) for layout in kinds.values())
        return ROUNDING * min(self._with_communication(computing, stage, 1, hardware) for stage in (1, 3))

    def least_seconds_of(self, layout: Layout, micro_batch_size: int, hardware: Hardware) -> float:
        """A step of this layout is not shorter: copies to the host and reads from NVMe beside it come on top."""
        micro_steps = self._job.effective_batch_size // hardware.world_size // micro_batch_size
        computing = micro_steps * self._least_computing(layout, hardware, micro_batch_size)
        seconds = self._with_communication(computing, layout.zero_stage, micro_steps, hardware)
        if layout.offload is not Offload.NONE:
            seconds += self._offload_waits(layout, hardware)
        return ROUNDING * seconds

    def _with_communication(self, computing: float, stage: int, micro_steps: int, hardware: Hardware) -> float:
        """What runs beside the computation is hidden but for a share, never more than the shorter of the two."""
        if hardware.world_size == 1:
            return computing
        gradients, trained, whole = self._bytes
        beside = ring_seconds(gradients, hardware, CALIBRATION) * (micro_steps if stage > 1 else 1)
        waiting = 0.0
        if stage == 3:
            beside += 2 * micro_steps * ring_seconds(whole, hardware, CALIBRATION)
        else:
            waiting = ring_seconds(trained, hardware, CALIBRATION)
        share = CALIBRATION.exposed
        return share * (computing + beside) + (1 - share) * max(computing, beside) + waiting

    @cached_property
    def _bytes(self) -> tuple[float, float, float]:
        """Of gradients, trained weights and all weights, as several GPUs hold them."""
        found = weights(self._job.architecture, self._job.options.model_copy(update={"zero_stage": 1}))
        return (
            found.trained * found.widths.gradient,
            found.trained * found.widths.weight,
            whole_weights(found),
        )

    def _least_computing(self, layout: Layout, hardware: Hardware, micro_batch_size: int) -> float:
        """Of one micro-step; stage 3 only adds to the lower stages'."""
        gpu = hardware.gpu
        key = (gpu.name, layout.zero_stage > 0, layout.gradient_checkpointing, micro_batch_size)
        found = self._computing.get(key)
        if found is None:
            found = self._computing[key] = self._compute(layout, gpu, micro_batch_size)
        return found

    def _compute(self, layout: Layout, gpu: Gpu, micro_batch_size: int) -> float:
        options = options_for(self._job, layout, gpu, gpus_per_node=1, nodes=1, micro_batch_size=micro_batch_size)
        options = options.model_copy(update={"zero_stage": min(1, layout.zero_stage)})
        known = self.work(options)
        parts = micro_step_parts(known.num_layers, known.weights, options, gpu, known.token, CALIBRATION)
        return sum(parts.values())

    def _offload_waits(self, layout: Layout, hardware: Hardware) -> float:
        """For the host's optimizer and what cannot be hidden, once a step."""
        key = (layout.offload, layout.offload_device, *_machine(hardware), *_host(hardware))
        found = self._waiting.get(key)
        if found is None:
            shape = {"gpus_per_node": hardware.gpus_per_node, "nodes": hardware.nodes}
            options = options_for(self._job, layout, hardware.gpu, micro_batch_size=1, **shape)
            times = offload_time(self.work(options).weights, options, hardware, CALIBRATION)
            found = self._waiting[key] = times.cpu_optimizer + times.waited_pcie + times.waited_nvme
        return found


def _used(options: TrainingOptions, hardware: Hardware) -> tuple[object, ...]:
    """All that the throughput depends on."""
    settings = (
        options.zero_stage,
        options.offload,
        options.offload_device,
        options.gradient_checkpointing,
        options.micro_batch_size,
    )
    host = () if options.offload is Offload.NONE else _host(hardware)
    return (*settings, *_machine(hardware), *host)


def _machine(hardware: Hardware) -> tuple[object, ...]:
    """GPUs and what links them; a node by itself has no use for its network."""
    network = hardware.inter_node_bytes_per_second if hardware.nodes > 1 else 0
    shape = (hardware.gpu.name, hardware.gpus_per_node, hardware.nodes)
    return (*shape, hardware.intra_node_bytes_per_second, network)


def _host(hardware: Hardware) -> tuple[object, ...]:
    return hardware.cores_per_node, hardware.nvme_bytes_per_node
