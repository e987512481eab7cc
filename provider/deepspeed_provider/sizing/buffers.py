# SPDX-License-Identifier: Apache-2.0
"""What ZeRO holds on one GPU beside the model states: buckets, gathered and undivided parameters.

``tests/sizing/test_real_engines.py`` compares each with tensors counted in DeepSpeed's engines.
"""

from __future__ import annotations

from typing import Final

from deepspeed_provider.sizing import zero
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.options import TrainingOptions
from deepspeed_provider.sizing.parts import Part
from deepspeed_provider.sizing.weights import Weights, partitions_packed, quantizable_in

_STAGE_1_AND_2: Final = "DeepSpeed runtime/zero/stage_1_and_2.py"


def zero_buffers(architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    """What ZeRO holds during forward and backward pass beside the states."""
    found = [reduce_bucket(architecture, weights, options), *offload_buffer(weights, options)]
    if options.zero_stage < 3:
        return found
    if options.world_size > 1 or options.offloads_parameters:
        found.append(_gathered(architecture, weights, options))
    if options.world_size > 1:
        threshold = zero.buckets(architecture, options).persistence_threshold
        trained = zero.persistent_elements(weights.trained_sizes, threshold)
        frozen = zero.persistent_elements(weights.frozen_sizes, threshold)
        found.append(
            Part(
                name="persistent_parameters",
                bytes=trained * weights.widths.weight + frozen * weights.frozen_width,
                formula="w * trained + v * frozen",
                numbers={
                    "w": weights.widths.weight,
                    "trained": trained,
                    "v": weights.frozen_width,
                    "frozen": frozen,
                },
                source="DeepSpeed runtime/zero/parameter_offload.py, stage3_param_persistence_threshold",
            )
        )
    return found


def _gathered(architecture: Architecture, weights: Weights, options: TrainingOptions) -> Part:
    """Packed weights are counted as the parameters that they hold; as bytes they are never gathered."""
    quantized = weights.quantized if partitions_packed(options) else 0
    rest = weights.frozen if weights.quantized else architecture.parameters
    live = zero.live_elements(
        options,
        partitioned=rest + quantized,
        largest=_largest_module(architecture, weights, options),
        prefetches=zero.buckets(architecture, options).prefetch > 0,
    )
    width = weights.frozen_width if weights.frozen else weights.widths.weight
    numbers: dict[str, float] = {"live": live, "w": width}
    return Part(
        name="gathered_parameters",
        bytes=live * (width * rest + weights.packed_bytes) // (rest + quantized) if quantized else live * width,
        formula="live * (w * P + ceil(Q / 2)) / (P + Q)" if quantized else "live * w",
        numbers=numbers | {"P": rest, "Q": quantized} if quantized else numbers,
        source="DeepSpeed runtime/zero/partitioned_param_coordinator.py, stage3_max_reuse_distance",
    )


def _largest_module(architecture: Architecture, weights: Weights, options: TrainingOptions) -> int:
    """Parameters that are gathered at once for it."""
    whole = partitions_packed(options) or not weights.quantized
    layers = (layer.parameters - (0 if whole else quantizable_in(layer, options)) for layer in architecture.layers)
    return max(architecture.token_embedding_parameters, *layers)


def reduce_bucket(architecture: Architecture, weights: Weights, options: TrainingOptions) -> Part:
    """Gradients on their way: made for each backward pass in stages 1 and 2, there always in stage 3."""
    elements = zero.reduce_buffer_elements(architecture, options)
    bucket = zero.buckets(architecture, options).reduce
    return Part(
        name="reduce_bucket",
        bytes=elements * weights.widths.gradient,
        formula="g * buckets * bucket",
        numbers={"g": weights.widths.gradient, "buckets": elements // bucket if bucket else 0, "bucket": bucket},
        source=f"{_STAGE_1_AND_2}, setup_buckets; stage3.py, _setup_for_real_optimizer",
    )


def offload_buffer(weights: Weights, options: TrainingOptions) -> list[Part]:
    """On the GPU, of the largest gradient, through which stages 1 and 2 add up gradients of the host."""
    if not options.offloads_optimizer or options.zero_stage == 3:
        return []
    largest = max(weights.trained_sizes, default=0)
    return [
        Part(
            name="offload_buffer",
            bytes=largest * weights.widths.weight,
            formula="w * largest",
            numbers={"w": weights.widths.weight, "largest": largest},
            source=f"{_STAGE_1_AND_2}, temp_grad_buffer_for_gpu_offload",
        )
    ]
