# SPDX-License-Identifier: Apache-2.0
"""How many elements DeepSpeed moves at once, sized to the model.

DeepSpeed allocates the reduce bucket when it starts, in the gradients' precision: its default of 5e8 elements
would cost 1 to 2 GB, more than a small model or an adapter itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Of a bucket, where the model is not known.
GPU_ELEMENTS: Final = 200_000_000
CPU_ELEMENTS: Final = 16_777_216
# Below it the latency of each collective costs more than the memory (2 MB in bf16) is worth.
SMALLEST_ELEMENTS: Final = 1_048_576
# DeepSpeed's own default; a larger bucket gains no bandwidth.
LARGEST_ELEMENTS: Final = 500_000_000
# Stage 3 keeps tensors smaller than this whole on each rank, where the model is not known: DeepSpeed's default.
PERSISTENCE_THRESHOLD_ELEMENTS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Sizes in elements.

    Attributes:
        reduce: gradients that are reduced together; no more than are trained.
        prefetch: parameters that stage 3 gathers ahead of use; no more than there are.
        persistence_threshold: tensors up to this size (norms, biases) are not partitioned by stage 3, as
            gathering them would cost more than holding them.
    """

    reduce: int
    prefetch: int
    persistence_threshold: int


def bucket_sizes(
    *,
    hidden_size: int | None = None,
    parameters: int | None = None,
    trained_parameters: int | None = None,
    use_gpu: bool = True,
) -> Buckets:
    """One square matrix of the model (hidden size squared) at a time, as the Hugging Face trainer does.

    Source of the rule: transformers/integrations/deepspeed.py, ``trainer_config_finalize``; bounds are ours.
    """
    largest = LARGEST_ELEMENTS if use_gpu else CPU_ELEMENTS
    if hidden_size is None:
        bucket = GPU_ELEMENTS if use_gpu else CPU_ELEMENTS
        prefetch, threshold = bucket // 10, PERSISTENCE_THRESHOLD_ELEMENTS
    else:
        bucket = min(max(hidden_size * hidden_size, SMALLEST_ELEMENTS), largest)
        prefetch, threshold = bucket * 9 // 10, 10 * hidden_size
    return Buckets(
        reduce=_at_most(bucket, trained_parameters),
        prefetch=_at_most(prefetch, parameters),
        persistence_threshold=threshold,
    )


def _at_most(elements: int, bound: int | None) -> int:
    """DeepSpeed refuses a bucket of nothing."""
    return elements if bound is None else max(1, min(elements, bound))
