# SPDX-License-Identifier: Apache-2.0
"""The whole DeepSpeed configuration as numbers: nothing is left for DeepSpeed to guess.

No value is ever "auto": outside the Hugging Face trainer DeepSpeed takes ``"enabled": "auto"`` as off
and most other autos as its defaults, silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Elements in one communication bucket. DeepSpeed allocates a bucket in the gradients' precision when
# it starts, so the default of 5e8 would cost 2 GB in fp32, more than a small model itself.
GPU_BUCKET_ELEMENTS = 200_000_000
CPU_BUCKET_ELEMENTS = 16_777_216

# Stage 3 keeps tensors smaller than this whole on each rank (norms, biases): gathering them costs more
# than holding them. DeepSpeed's own default.
PERSISTENCE_THRESHOLD_ELEMENTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTriple:
    """Sequences per optimizer step, and how they are split."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int

    @property
    def effective_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size


def deepspeed_config(
    *, batch: BatchTriple, zero_stage: int, precision: str, gradient_clipping: float, use_gpu: bool
) -> dict[str, Any]:
    """DeepSpeed's JSON for one training.

    Args:
        batch: must be the world size that the training will find; DeepSpeed checks the product.
        zero_stage: 0 to 3.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        gradient_clipping: largest global norm of the gradients.
        use_gpu: sizes buckets and overlap for GPU or CPU.
    """
    return {
        "train_batch_size": batch.effective_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": gradient_clipping,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": _fp16(precision),
        "zero_optimization": _zero(zero_stage, use_gpu),
        # The training passes its own AdamW with warm-up and decay.
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
        # Progress is written by the training itself; DeepSpeed's own lines would only fill the log.
        "steps_per_print": 1_000_000,
    }


def _fp16(precision: str) -> dict[str, Any]:
    if precision != "fp16":
        return {"enabled": False}
    return {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }


def _zero(stage: int, use_gpu: bool) -> dict[str, Any]:
    if stage == 0:
        return {"stage": 0}
    bucket = GPU_BUCKET_ELEMENTS if use_gpu else CPU_BUCKET_ELEMENTS
    config: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "contiguous_gradients": True,
        # Overlap needs streams beside the computing one, which a CPU has not.
        "overlap_comm": use_gpu,
    }
    if stage == 3:
        del config["allgather_bucket_size"]  # stages 1 and 2 only
        config |= {
            "stage3_prefetch_bucket_size": bucket // 10,
            "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD_ELEMENTS,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            # Each rank holds a shard; a model folder needs whole weights.
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return config
