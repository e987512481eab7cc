# SPDX-License-Identifier: Apache-2.0
"""How ZeRO cuts tensors, and what it holds beside the model states, as DeepSpeed 0.19.8 does.

Read in its runtime/zero (stage_1_and_2.py, stage3.py, partitioned_param_coordinator.py) and counted in real
engines by tests/sizing/test_real_engines.py. Bucket sizes that are not given are those of the Hugging Face
trainer's "auto" (transformers/integrations/deepspeed.py): they follow the hidden size h.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.options import TrainingOptions
from deepspeed_provider.sizing.tensor_sizes import Sizes


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


@lru_cache(maxsize=4096)
def partition_elements(sizes: Sizes, *, stage: int, ranks: int) -> int:
    """What one rank's optimizer steps.

    Stages 1 and 2 cut all tensors laid end to end, padded to 2 elements a rank (flatten_dense_tensors_aligned);
    stage 3 cuts each tensor by itself (partition_parameters.py).
    """
    if stage == 0:
        return sum(sizes)
    if stage == 3:
        return sum(-(-size // ranks) for size in sizes)
    return 2 * -(-sum(sizes) // (2 * ranks))


@lru_cache(maxsize=4096)
def kept_gradient_elements(sizes: Sizes, *, stage: int, ranks: int) -> int:
    """Of the fullest rank, once reduced. Stages 1 and 2 keep each tensor whole that reaches into the rank's
    partition (copy_grads_in_partition), stage 3 the partition (grad_partitions_flat_buffer)."""
    share = partition_elements(sizes, stage=stage, ranks=ranks)
    if stage in (0, 3) or not share:
        return share
    held, start = [0] * ranks, 0
    for size in sizes:
        for rank in range(start // share, (start + size - 1) // share + 1):
            held[rank] += size
        start += size
    return max(held)


def sub_group_elements(sizes: Sizes, *, ranks: int, limit: int) -> int:
    """The largest of the groups in which stage 3 steps: whole shares of tensors until there are ``limit``
    (stage3.py, _create_fp16_sub_groups)."""
    share = partition_elements(sizes, stage=3, ranks=ranks)
    if limit >= share:
        return share
    largest = group = 0
    for size in sizes:
        group += -(-size // ranks)
        largest = max(largest, group)
        group = 0 if group >= limit else group
    return largest


def persistent_elements(sizes: Sizes, threshold: int) -> int:
    """Tensors no larger than the threshold (norms, biases), which stage 3 keeps whole on each rank."""
    return sum(size for size in sizes if size <= threshold)


def live_elements(options: TrainingOptions, *, partitioned: int, largest: int, prefetches: bool) -> int:
    """Gathered parameters at the turn from forward to backward pass, in stage 3.

    Two rules of partitioned_param_coordinator.py, whichever keeps more:

    - A module's parameters are released unless they come again within ``max_reuse_distance`` elements
      (__params_to_release). At the turn, a layer d elements before the end comes again after 2 d, so half
      the distance stays gathered; a third when each layer runs again before its backward pass.
    - Every call of a module, also of those without parameters, fetches another bucket ahead
      (_fetch_sub_module_impl). There are about twice as many as tensors, so that the fetched run ahead,
      layer by layer, until ``max_live_parameters`` are there.

    At least the ``largest`` module is there whole, and never more than what is ``partitioned``; elements all.
    """
    passes = 3 if options.gradient_checkpointing else 2
    reused = options.stage3_max_reuse_distance // passes
    ahead = options.stage3_max_live_parameters if prefetches else 0
    return min(partitioned, max(largest, reused, ahead))
