# SPDX-License-Identifier: Apache-2.0
"""Seconds that offloaded states and parameters cost: PCIe, the CPU's optimizer, NVMe drives."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_provider.clusters.calibration import Calibration
from deepspeed_provider.clusters.communication import whole_weights
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.sizing.options import OffloadDevice, TrainingOptions
from deepspeed_provider.sizing.states import state_bytes
from deepspeed_provider.sizing.weights import Weights


@dataclass(frozen=True, kw_only=True)
class OffloadTime:
    """Seconds of one optimizer step: copies and reads beside the computation, the rest while the GPU waits."""

    pcie: float = 0.0
    nvme: float = 0.0
    waited_pcie: float = 0.0
    waited_nvme: float = 0.0
    cpu_optimizer: float = 0.0


def offload_time(found: Weights, options: TrainingOptions, hardware: Hardware, calibration: Calibration) -> OffloadTime:
    """Nothing unless something is offloaded."""
    link = hardware.pcie_bytes_per_second * calibration.pcie
    nvme = options.offload_device is OffloadDevice.NVME
    drive = hardware.nvme_bytes_per_node or calibration.nvme_assumed_bytes
    read, write = drive * calibration.nvme_read, drive * calibration.nvme_write
    micro_steps, ranks = options.gradient_accumulation_steps, hardware.world_size
    trained_bytes = found.trained * found.widths.weight
    pcie = reads = waited_pcie = swapped = cpu = 0.0
    if options.offloads_optimizer:
        # Each rank sends its part of the gradients after each micro-step, and steps its part of the parameters.
        pcie += micro_steps * found.trained * found.widths.gradient / ranks / link
        cores = hardware.cores_per_node * calibration.cpu_adam_parameters_per_second
        cpu = found.trained / hardware.nodes / cores
        waited_pcie = trained_bytes / ranks / link
        if nvme:
            states = state_bytes(found.trained, options.optimizer, found.trained_precision)
            moved = (states + found.trained * (found.widths.master or found.widths.weight)) / hardware.nodes
            swapped = moved / read + moved / write
    if options.offloads_parameters:
        # Fetched for the forward and again for the backward pass of each micro-step.
        pcie += 2 * micro_steps * whole_weights(found) / ranks / link
        if nvme:
            reads = 2 * micro_steps * whole_weights(found) / hardware.nodes / read
            swapped += trained_bytes / hardware.nodes / write
    # Swapping is pipelined with the CPU's step; only what it takes longer is waited for.
    return OffloadTime(
        pcie=pcie, nvme=reads, waited_pcie=waited_pcie, waited_nvme=max(0.0, swapped - cpu), cpu_optimizer=cpu
    )
