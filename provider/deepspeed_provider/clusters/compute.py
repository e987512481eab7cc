# SPDX-License-Identifier: Apache-2.0
"""Seconds that one GPU computes: products, attention, what moves through its memory, the optimizer."""

from __future__ import annotations

from deepspeed_provider.clusters.calibration import A100_MATMUL_SHARE, FLASH_SHARE, FLASH_SHARE_HOPPER, Calibration
from deepspeed_provider.clusters.flops import TokenWork, weight_bytes_moved
from deepspeed_provider.clusters.gpus import Gpu
from deepspeed_provider.sizing.options import Attention, Loss, Precision, TrainingOptions
from deepspeed_provider.sizing.states import state_bytes
from deepspeed_provider.sizing.weights import Weights


def peak_flops(gpu: Gpu, precision: Precision) -> float:
    """Of the units that compute this precision; before Ampere, bf16 has no tensor cores."""
    if precision is Precision.FP32 or (precision in (Precision.BF16, Precision.PURE_BF16) and not gpu.bf16):
        return gpu.dense_flops_fp32
    return gpu.dense_flops_16bit


def micro_step_parts(
    num_layers: int,
    found: Weights,
    options: TrainingOptions,
    gpu: Gpu,
    work: TokenWork,
    calibration: Calibration,
) -> dict[str, float]:
    """Seconds by part of one micro-batch's forward and backward pass.

    What depends on the number of tokens and what does not are added: with few tokens the weights' way through
    the memory weighs as much as the products, which is why small batches reach less of the peak.
    """
    tokens, width = options.tokens, 4 if options.precision is Precision.FP32 else 2
    memory = gpu.memory_bytes_per_second
    loss = calibration.logits_bytes * (2 if options.loss in (Loss.FULL, Loss.CHUNKED) else 1)
    parts = {
        "matmul": tokens * work.matmul_flops / matmul_rate(gpu, options.precision, calibration),
        "attention": tokens * _attention(options, gpu, work, calibration),
        "activations": tokens * work.activation_elements * width * calibration.activation_passes / memory,
        "loss": tokens * work.logits * loss / memory,
        "weights": weight_bytes_moved(found, options) / memory,
    }
    floor = host_seconds(num_layers, options, work, calibration)
    return parts | {"launches": max(0.0, floor - sum(parts.values()))}


def host_seconds(num_layers: int, options: TrainingOptions, work: TokenWork, calibration: Calibration) -> float:
    """Of one micro-step: the time in which Python starts all kernels. The GPU works beside it, never ahead of it."""
    launches = num_layers * calibration.launches_per_layer + work.adapters * calibration.launches_per_adapter
    passes = 4 if options.gradient_checkpointing else 3
    hooks = num_layers * calibration.hook_seconds if options.zero_stage == 3 else 0.0
    return passes * launches * calibration.launch_seconds + hooks


def matmul_rate(gpu: Gpu, precision: Precision, calibration: Calibration) -> float:
    """FLOP/s of a model's products."""
    return peak_flops(gpu, precision) * gpu.matmul_share * calibration.matmul


def optimizer_seconds(found: Weights, options: TrainingOptions, gpu: Gpu) -> float:
    """One step on the GPU: states, master weights and gradients are read, all but the gradients written."""
    share = options.world_size if options.zero_stage else 1
    states = state_bytes(found.trained, options.optimizer, found.trained_precision)
    master = found.trained * (found.widths.master or found.widths.weight)
    rest = found.trained * (found.widths.gradient + found.widths.weight)
    return (2 * states + 2 * master + rest) / share / gpu.memory_bytes_per_second


def _attention(options: TrainingOptions, gpu: Gpu, work: TokenWork, calibration: Calibration) -> float:
    """Seconds a token. Flash kernels need Ampere; before, torch takes the memory-efficient one."""
    if options.attention is Attention.EAGER or options.precision is Precision.FP32:
        rate = matmul_rate(gpu, options.precision, calibration)
        moved = work.scores * calibration.score_bytes if options.attention is Attention.EAGER else 0.0
        return work.attention_flops / rate + moved / gpu.memory_bytes_per_second
    # The kernel's share of the peak was measured on A100; a GPU that its power limit holds back is as much slower here.
    held_back = min(1.0, gpu.matmul_share / A100_MATMUL_SHARE)
    share = FLASH_SHARE_HOPPER if gpu.compute_capability >= (9, 0) else FLASH_SHARE * held_back
    kernel = calibration.sdpa if options.attention is Attention.SDPA or gpu.compute_capability < (8, 0) else 1.0
    return work.attention_flops / (peak_flops(gpu, options.precision) * share * kernel * calibration.flash)
