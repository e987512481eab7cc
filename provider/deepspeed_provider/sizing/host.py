# SPDX-License-Identifier: Apache-2.0
"""Memory of one node's host, and of its NVMe."""

from __future__ import annotations

from typing import Final

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

_OFFLOAD = "DeepSpeed estimate_zero3_model_states_mem_needs, without its safety factor of 1.5"


def host_parts(weights: Weights, options: TrainingOptions) -> tuple[Part, ...]:
    """Of the fullest node. Loading and training do not peak together: only the larger one counts."""
    training = [
        *_offloaded(weights, options, OffloadDevice.CPU),
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
    parts = []
    widths, nodes, trained = weights.widths, options.nodes, weights.trained
    if options.offloads_optimizer:
        states = state_bytes(trained, options.optimizer, weights.trained_precision)
        master = trained * widths.master
        # Gradients are kept in the precision that the optimizer steps in.
        gradients = trained * (widths.master or widths.gradient)
        parts.append(
            Part(
                name="offloaded_optimizer",
                bytes=(states + master + gradients) // nodes,
                formula="(states + master + gradients) / nodes",
                numbers={"states": states, "master": master, "gradients": gradients, "nodes": nodes},
                source=_OFFLOAD,
            )
        )
    if options.offloads_parameters:
        low = trained * widths.weight + weights.frozen * weights.frozen_width + weights.quantized_bytes
        parts.append(
            Part(
                name="offloaded_parameters",
                bytes=low // nodes,
                formula="weights / nodes",
                numbers={"weights": low, "nodes": nodes},
                source=_OFFLOAD,
            )
        )
    return parts


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
