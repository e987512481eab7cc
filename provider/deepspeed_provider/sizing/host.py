# SPDX-License-Identifier: Apache-2.0
"""Memory of one node's host, and of its NVMe."""

from __future__ import annotations

from typing import Final

from deepspeed_provider.sizing.model_states import master_width, partition_elements, reduced_gradient_elements
from deepspeed_provider.sizing.options import OffloadDevice, TrainingOptions
from deepspeed_provider.sizing.parts import Part, present
from deepspeed_provider.sizing.states import OPTIMIZERS, PRECISIONS, state_bytes
from deepspeed_provider.sizing.weights import Weights

GIB: Final = 2**30
# A rank's Python process with torch, transformers and a CUDA context, beside weights and data.
PROCESS_BYTES: Final = 3 * GIB
# Worker processes of a rank's data loader: copies of the interpreter that share most pages.
LOADER_BYTES: Final = GIB // 2
# DeepSpeed's defaults (zero/offload_config.py): buffers through which states and parameters are swapped.
OPTIMIZER_BUFFERS: Final = 4
PARAMETER_BUFFERS: Final = 5
PARAMETER_BUFFER_ELEMENTS: Final = 100_000_000


def host_parts(weights: Weights, options: TrainingOptions) -> tuple[Part, ...]:
    """Of the fullest node. Loading and training do not peak together: only the larger one counts."""
    training = [
        *_offloaded(weights, options, OffloadDevice.CPU),
        *_offload_buffers(weights, options),
        *_staging(weights, options),
        *_paged(weights, options),
    ]
    loading = _loading(weights, options)
    larger = training if sum(part.bytes for part in training) >= loading.bytes else [loading]
    ranks = options.gpus_per_node
    return present(
        [
            Part(
                name="processes",
                bytes=ranks * PROCESS_BYTES,
                formula="3 GiB x ranks",
                numbers={"ranks": ranks},
                source="resident size of an idle rank, rounded up",
            ),
            Part(
                name="data_loader",
                bytes=ranks * LOADER_BYTES,
                formula="0.5 GiB x ranks",
                numbers={"ranks": ranks},
                source="token batches are small; worker processes share most pages",
            ),
            *larger,
        ]
    )


def nvme_parts(weights: Weights, options: TrainingOptions) -> tuple[Part, ...]:
    """Of one node's drive; nothing unless something is offloaded there."""
    return present(_offloaded(weights, options, OffloadDevice.NVME))


def _offloaded(weights: Weights, options: TrainingOptions, device: OffloadDevice) -> list[Part]:
    if options.offload_device is not device:
        return []
    parts, ranks = [], options.gpus_per_node
    if options.offloads_optimizer:
        elements, master = partition_elements(weights, options), master_width(weights, options)
        states = state_bytes(elements, options.optimizer, weights.trained_precision)
        # Gradients are kept in the precision that the optimizer steps in.
        parts.append(
            Part(
                name="offloaded_optimizer",
                bytes=ranks * (states + 2 * elements * master),
                formula="ranks x (states + master + gradients)",
                numbers={"ranks": ranks, "states": states, "master": elements * master, "gradients": elements * master},
                source="DeepSpeed runtime/zero/stage_1_and_2.py, single_partition_of_fp32_groups; "
                "stage3.py, fp32_partitioned_groups_flat",
            )
        )
    if options.offloads_parameters:
        low = _parameter_bytes(weights, options)
        parts.append(
            Part(
                name="offloaded_parameters",
                bytes=ranks * low,
                formula="ranks x weights / N",
                numbers={"ranks": ranks, "weights / N": low, "N": options.world_size},
                source="DeepSpeed runtime/zero/stage3.py, param_groups_fp16_flat_cpu_memory",
            )
        )
    return parts


def _parameter_bytes(weights: Weights, options: TrainingOptions) -> int:
    """One rank's share of all weights, stage 3."""
    trained = partition_elements(weights, options) * weights.widths.weight
    rest = weights.frozen * weights.frozen_width + weights.quantized_bytes
    return trained - (-rest // options.world_size)


def _offload_buffers(weights: Weights, options: TrainingOptions) -> list[Part]:
    """What DeepSpeed keeps in host memory beside offloaded states, wherever these go."""
    if not options.offloads_optimizer:
        return []
    ranks, elements = options.gpus_per_node, partition_elements(weights, options)
    width, largest = weights.widths.weight, max(weights.trained_sizes, default=0)
    accumulated = 0
    if options.zero_stage < 3 and options.gradient_accumulation_steps > 1:
        accumulated = reduced_gradient_elements(weights, options)
    staged = 0 if options.zero_stage == 3 else largest
    buffers = Part(
        name="offload_buffers",
        bytes=ranks * width * (elements + staged + accumulated),
        formula="ranks x w x (T / N + largest tensor + accumulated)",
        numbers={"ranks": ranks, "w": width, "T / N": elements, "largest": staged, "accumulated": accumulated},
        source="DeepSpeed runtime/zero/stage_1_and_2.py: weights on their way back, a gradient on its way; "
        "stage3.py: grad_partitions_flat_buffer",
    )
    pinned = _pinned_tensors(weights, options)
    rounding = Part(
        name="pinned_rounding",
        bytes=ranks * sum(_next_power_of_two(size) - size for size in pinned),
        formula="ranks x (next power of two - size) of each pinned tensor",
        numbers={"ranks": ranks, "pinned": sum(pinned)},
        source="DeepSpeed zero/offload_config.py: pin_memory is on; torch ATen/core/CachingHostAllocator.h",
    )
    return [buffers, rounding]


def _pinned_tensors(weights: Weights, options: TrainingOptions) -> list[int]:
    """Bytes of each tensor of one rank that is locked in memory; the optimizer's own states are not."""
    elements, master = partition_elements(weights, options), master_width(weights, options)
    width = weights.widths.weight
    if options.zero_stage == 3:
        parameters = [_parameter_bytes(weights, options)] if options.offloads_parameters else []
        stepped = [] if options.offload_device is OffloadDevice.NVME else [elements * master]
        return [elements * width, *stepped, *parameters]
    return [elements * master, elements * master, elements * width, max(weights.trained_sizes, default=0) * width]


def _next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def _staging(weights: Weights, options: TrainingOptions) -> list[Part]:
    """Pinned buffers of the host through which NVMe is read and written, for each rank."""
    if options.offload_device is not OffloadDevice.NVME:
        return []
    parts, ranks = [], options.gpus_per_node
    if options.offloads_optimizer:
        group = min(options.sub_group_size, -(-weights.trained // options.world_size))
        states = OPTIMIZERS[options.optimizer].count + 2  # master weights and gradients
        parts.append(
            Part(
                name="optimizer_swap_buffers",
                bytes=ranks * max(OPTIMIZER_BUFFERS, states) * group * 4,
                formula="ranks x buffers x sub_group x 4 B",
                numbers={"ranks": ranks, "buffers": max(OPTIMIZER_BUFFERS, states), "sub_group": group},
                source="DeepSpeed zero/offload_config.py, buffer_count",
            )
        )
    if options.offloads_parameters:
        width = PRECISIONS[options.precision].weight
        parts.append(
            Part(
                name="parameter_swap_buffers",
                bytes=ranks * PARAMETER_BUFFERS * PARAMETER_BUFFER_ELEMENTS * width,
                formula="ranks x 5 x 1e8 x width",
                numbers={"ranks": ranks, "width": width},
                source="DeepSpeed zero/offload_config.py, buffer_count and buffer_size",
            )
        )
    return parts


def _paged(weights: Weights, options: TrainingOptions) -> list[Part]:
    if not OPTIMIZERS[options.optimizer].paged or options.offloads_optimizer:
        return []
    states = state_bytes(weights.trained, options.optimizer, weights.trained_precision)
    shards = options.world_size if options.zero_stage else 1
    return [
        Part(
            name="paged_optimizer",
            bytes=options.gpus_per_node * states // shards,
            formula="ranks x states / partitions",
            numbers={"ranks": options.gpus_per_node, "states": states, "partitions": shards},
            source="bitsandbytes: paged states move to the host when the GPU is short",
        )
    ]


def _loading(weights: Weights, options: TrainingOptions) -> Part:
    """Each rank reads the whole checkpoint, all at once unless they take turns."""
    width = weights.frozen_width if weights.frozen and not weights.quantized else 0
    whole = (weights.trained if weights.adapters is None else 0) * PRECISIONS[options.precision].weight
    whole += weights.frozen * (width or PRECISIONS[options.precision].weight)
    whole += weights.quantized * PRECISIONS[options.precision].weight
    copies = 1 if options.load_in_turn else options.gpus_per_node
    return Part(
        name="checkpoint_loading",
        bytes=copies * whole,
        formula="ranks at once x weights",
        numbers={"ranks at once": copies, "weights": whole},
        source="transformers from_pretrained without zero.Init",
    )
