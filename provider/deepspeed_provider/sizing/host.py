# SPDX-License-Identifier: Apache-2.0
"""Memory of one node's host, and of its NVMe."""

from __future__ import annotations

from typing import Final

from deepspeed_provider.sizing.model_states import (
    EXTENT,
    extent_numbers,
    master_width,
    partition_elements,
    reduced_gradient_elements,
)
from deepspeed_provider.sizing.options import OffloadDevice, TrainingOptions
from deepspeed_provider.sizing.parts import Part, present
from deepspeed_provider.sizing.states import OPTIMIZERS, PRECISIONS, state_bytes, state_formula, state_numbers
from deepspeed_provider.sizing.weights import Weights, partitions_packed
from deepspeed_provider.sizing.zero import sub_group_elements

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
    """Of the fullest node, at the moment that needs most. Loading and training do not peak together."""
    moments = host_moments(weights, options)
    return max(moments.values(), key=lambda parts: sum(part.bytes for part in parts))


def host_moments(weights: Weights, options: TrainingOptions) -> dict[str, tuple[Part, ...]]:
    """What the fullest node's host holds while the checkpoint is loaded, and while the model trains."""
    always = _processes(options)
    offloaded = _offloaded(weights, options, OffloadDevice.CPU)
    training = [
        *offloaded,
        *_offload_buffers(weights, options),
        *swap_buffers(weights, options),
        *_paged(weights, options),
    ]
    # Partitions of parameters are there before they are filled, optimizer states only afterwards.
    loading = [_loading(weights, options), *(part for part in offloaded if part.name == "offloaded_parameters")]
    return {"training": present([*always, *training]), "loading": present([*always, *loading])}


def nvme_parts(weights: Weights, options: TrainingOptions) -> tuple[Part, ...]:
    """Of one node's drive; nothing unless something is offloaded there."""
    return present(_offloaded(weights, options, OffloadDevice.NVME))


def _processes(options: TrainingOptions) -> list[Part]:
    ranks = options.gpus_per_node
    return [
        Part(
            name="processes",
            bytes=ranks * PROCESS_BYTES,
            formula="ranks * process",
            numbers={"ranks": ranks, "process": PROCESS_BYTES},
            source="resident size of an idle rank, rounded up: 3 GiB",
        ),
        Part(
            name="data_loader",
            bytes=ranks * LOADER_BYTES,
            formula="ranks * loader",
            numbers={"ranks": ranks, "loader": LOADER_BYTES},
            source="0.5 GiB: token batches are small; worker processes share most pages",
        ),
    ]


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
                formula=f"ranks * ({state_formula(options.optimizer, EXTENT)} + 2 * m * {EXTENT})",
                numbers={
                    "ranks": ranks,
                    **state_numbers(options.optimizer, weights.trained_precision),
                    "m": master,
                    **extent_numbers(weights, options),
                },
                source="states, master weights and gradients: DeepSpeed runtime/zero/stage_1_and_2.py, "
                "single_partition_of_fp32_groups; stage3.py, fp32_partitioned_groups_flat",
            )
        )
    if options.offloads_parameters:
        parts.append(_offloaded_parameters(weights, options))
    return parts


def _offloaded_parameters(weights: Weights, options: TrainingOptions) -> Part:
    rest = ""
    numbers: dict[str, float] = {"w": weights.widths.weight, **extent_numbers(weights, options)}
    if weights.frozen:
        rest = " + ceil(v * F / N)"
        numbers |= {"v": weights.frozen_width, "F": weights.frozen}
    if weights.quantized and partitions_packed(options):
        rest = " + ceil((v * F + ceil(Q / 2)) / N)"
        numbers |= {"Q": weights.quantized}
    return Part(
        name="offloaded_parameters",
        bytes=options.gpus_per_node * _parameter_bytes(weights, options),
        formula=f"ranks * (w * {EXTENT}{rest})",
        numbers={"ranks": options.gpus_per_node, **numbers},
        source="DeepSpeed runtime/zero/stage3.py, param_groups_fp16_flat_cpu_memory",
    )


def _parameter_bytes(weights: Weights, options: TrainingOptions) -> int:
    """One rank's share of all weights, stage 3; of packed ones where it can cut them."""
    trained = partition_elements(weights, options) * weights.widths.weight
    packed = weights.packed_bytes if partitions_packed(options) else 0
    rest = weights.frozen * weights.frozen_width + packed
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
        formula=f"ranks * w * ({EXTENT} + largest + accumulated)",
        numbers={
            "ranks": ranks,
            "w": width,
            **extent_numbers(weights, options),
            "largest": staged,
            "accumulated": accumulated,
        },
        source="DeepSpeed runtime/zero/stage_1_and_2.py: weights on their way back, a gradient on its way; "
        "stage3.py: grad_partitions_flat_buffer",
    )
    pinned = _pinned_tensors(weights, options)
    rounded = sum(_next_power_of_two(size) for size in pinned)
    rounding = Part(
        name="pinned_rounding",
        bytes=ranks * (rounded - sum(pinned)),
        formula="ranks * (powers_of_two - pinned)",
        numbers={"ranks": ranks, "powers_of_two": rounded, "pinned": sum(pinned)},
        source="DeepSpeed zero/offload_config.py: pin_memory is on; torch ATen/core/CachingHostAllocator.h gives "
        "each pinned tensor the next power of two",
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


def swap_buffers(weights: Weights, options: TrainingOptions) -> list[Part]:
    """Locked buffers of the host through which NVMe is read and written, for each rank."""
    if options.offload_device is not OffloadDevice.NVME:
        return []
    parts, ranks = [], options.gpus_per_node
    if options.offloads_optimizer:
        group = sub_group_elements(weights.trained_sizes, ranks=options.world_size, limit=options.sub_group_size)
        width = master_width(weights, options)
        parts.append(
            Part(
                name="optimizer_swap_buffers",
                bytes=ranks * OPTIMIZER_BUFFERS * group * width,
                formula="ranks * buffers * sub_group * m",
                numbers={"ranks": ranks, "buffers": OPTIMIZER_BUFFERS, "sub_group": group, "m": width},
                source="DeepSpeed runtime/swap_tensor/optimizer_utils.py, SwapBufferManager: each holds the largest "
                "sub-group; zero/offload_config.py, buffer_count",
            )
        )
    if options.offloads_parameters:
        width = PRECISIONS[options.precision].weight
        parts.append(
            Part(
                name="parameter_swap_buffers",
                bytes=ranks * PARAMETER_BUFFERS * PARAMETER_BUFFER_ELEMENTS * width,
                formula="ranks * buffers * elements * w",
                numbers={
                    "ranks": ranks,
                    "buffers": PARAMETER_BUFFERS,
                    "elements": PARAMETER_BUFFER_ELEMENTS,
                    "w": width,
                },
                source="DeepSpeed runtime/swap_tensor/partitioned_param_swapper.py, whatever the model's size; "
                "zero/offload_config.py, buffer_count and buffer_size",
            )
        )
    return parts


def _paged(weights: Weights, options: TrainingOptions) -> list[Part]:
    if not OPTIMIZERS[options.optimizer].paged or options.offloads_optimizer:
        return []
    elements, precision = partition_elements(weights, options), weights.trained_precision
    return [
        Part(
            name="paged_optimizer",
            bytes=options.gpus_per_node * state_bytes(elements, options.optimizer, precision),
            formula=f"ranks * {state_formula(options.optimizer, EXTENT)}",
            numbers={
                "ranks": options.gpus_per_node,
                **state_numbers(options.optimizer, precision),
                **extent_numbers(weights, options),
            },
            source="bitsandbytes: paged states move to the host when the GPU is short",
        )
    ]


def _loading(weights: Weights, options: TrainingOptions) -> Part:
    """Whole copies of the checkpoint in memory at once.

    Each rank reads one, unless they take turns. In stage 3 only the first rank of all reads values, which go
    straight into partitions; the others read names and shapes. Not so where weights are quantised on the way.
    """
    width = PRECISIONS[options.precision].weight
    parameters = weights.frozen + weights.quantized if weights.frozen else weights.trained
    one = options.load_in_turn or (options.zero_stage == 3 and not weights.quantized)
    copies = 1 if one else options.gpus_per_node
    return Part(
        name="checkpoint_loading",
        bytes=copies * width * parameters,
        formula="copies * w * P",
        numbers={"copies": copies, "w": width, "P": parameters},
        source="transformers modeling_utils.py, _load_pretrained_model; files are mapped, so that of what is not "
        "converted the kernel can take pages back",
    )
