# SPDX-License-Identifier: Apache-2.0
"""What ZeRO holds beside the model states, as DeepSpeed 0.19.8 does (runtime/zero/stage_1_and_2.py, stage3.py).

Bucket sizes that are not given are those of the Hugging Face trainer's "auto"
(transformers/integrations/deepspeed.py): they follow the hidden size h.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Sizes in elements."""

    reduce: int
    prefetch: int
    persistence_threshold: int


def buckets(architecture: Architecture, options: TrainingOptions) -> Buckets:
    hidden = architecture.hidden_size
    prefetch, threshold = options.stage3_prefetch_bucket_size, options.stage3_param_persistence_threshold
    return Buckets(
        reduce=hidden * hidden if options.reduce_bucket_size is None else options.reduce_bucket_size,
        prefetch=hidden * hidden * 9 // 10 if prefetch is None else prefetch,
        persistence_threshold=10 * hidden if threshold is None else threshold,
    )


def reduce_buffer_elements(architecture: Architecture, options: TrainingOptions) -> int:
    """Gradients on their way to their rank: one bucket, or two when reduction overlaps the backward pass."""
    if options.zero_stage == 0:
        return 0
    copies = 2 if options.overlaps and options.zero_stage < 3 else 1
    return copies * buckets(architecture, options).reduce


def persistent_elements(architecture: Architecture, threshold: int) -> int:
    """Parameters no larger than the threshold (norms, biases), which stage 3 keeps whole on each rank."""
    kept = architecture.final_norm_parameters if architecture.final_norm_parameters <= threshold else 0
    for layer in architecture.layers:
        inside = layer.norm_parameters if architecture.hidden_size <= threshold else 0
        for linear in layer.linears:
            inside += linear.weights if linear.weights <= threshold else 0
            inside += linear.copies * linear.out_features if linear.bias and linear.out_features <= threshold else 0
        kept += layer.count * inside
    return kept


def live_elements(architecture: Architecture, options: TrainingOptions) -> int:
    """Gathered parameters at the turn from forward to backward pass, in stage 3.

    A module's parameters are released unless they come again within ``max_reuse_distance`` elements
    (partitioned_param_coordinator.py): at the turn, a layer d elements before the end comes again
    after 2 d, so half the distance stays gathered. To that comes what is prefetched; at least the
    largest module is there whole, and never more than the model.
    """
    largest = max(architecture.token_embedding_parameters, max(layer.parameters for layer in architecture.layers))
    near_the_turn = max(largest, options.stage3_max_reuse_distance // 2)
    ahead = near_the_turn + buckets(architecture, options).prefetch
    return min(architecture.parameters, max(largest, min(ahead, options.stage3_max_live_parameters)))
