# SPDX-License-Identifier: Apache-2.0
"""What an estimate assumes, and what its reader should know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.gpu import gpu_parts
from deepspeed_provider.sizing.host import nvme_parts, swap_buffers
from deepspeed_provider.sizing.model_states import ordinary_loop, partition_elements
from deepspeed_provider.sizing.options import (
    Attention,
    Loss,
    Method,
    Offload,
    OffloadDevice,
    Padding,
    Precision,
    QuantStorage,
    TrainingOptions,
)
from deepspeed_provider.sizing.states import OPTIMIZERS, nf4_bytes
from deepspeed_provider.sizing.weights import Weights, engine_casts, experts_in_4_bits, unquantized_width
from deepspeed_provider.sizing.weights import weights as weights_of

GIB: Final = 2**30
# A lower stage is told of where it needs at least a hundredth less.
LESS: Final = 0.99


def assumptions(weights: Weights, options: TrainingOptions) -> tuple[str, ...]:
    """What was taken for granted where the options do not say."""
    found = []
    if options.holds_outputs and options.loss is not Loss.FUSED:
        found.append("The training loop holds the model's output, logits included, through the backward pass.")
    if options.padding is Padding.MAX_LENGTH:
        found.append("All batches have the same length (padded to the sequence length, or packed).")
    if options.attention is Attention.SDPA:
        found.append("SDPA runs with a padding mask: each layer keeps the mask, and keys and values at query width.")
    if options.gradient_accumulation_steps == 1:
        found.append("Gradients are freed after each step (zero_grad(set_to_none=True)).")
    if options.zero_stage and options.reduce_bucket_size is None:
        found.append("ZeRO bucket sizes follow the hidden size, as the Hugging Face trainer's 'auto' does.")
    if options.zero_stage and options.precision in (Precision.FP32, Precision.PURE_BF16):
        found.append("ZeRO's optimizer steps a copy of the weights of its own, also in the weights' precision.")
    found += _without_zero(weights, options)
    found += _of_adapters(options)
    return tuple(found)


def _without_zero(weights: Weights, options: TrainingOptions) -> list[str]:
    if options.zero_stage:
        return []
    if ordinary_loop(weights, options):
        return ["On one GPU and without master weights, torch's optimizer steps the weights themselves: no engine."]
    found = ["Without ZeRO, DeepSpeed's engine still reduces gradients in a flat copy, once a step."]
    if weights.widths.master:
        found.append("It also casts all of them to fp32 for the optimizer's step.")
    return found


def _of_adapters(options: TrainingOptions) -> list[str]:
    if options.method is Method.FULL:
        return []
    found = []
    if engine_casts(options):
        found.append(f"DeepSpeed's engine keeps adapters, norms and embeddings in {options.precision.value} too.")
    elif options.adapter_precision is None:
        found.append(f"Adapters are kept in {options.adapters.value}.")
    if options.method is Method.QLORA and options.upcasts and not engine_casts(options):
        found.append("Embeddings, head and norms are fp32 (prepare_model_for_kbit_training).")
    return found


def warnings(
    architecture: Architecture, found: Weights, options: TrainingOptions, *, gpu_bytes: int
) -> tuple[str, ...]:
    """What may surprise: unknown architectures, combinations that do not do what they seem to.

    ``gpu_bytes`` is the estimate's total on a GPU.
    """
    return (
        *architecture.warnings,
        *(() if found.adapters is None else found.adapters.warnings),
        *_of_quantisation(architecture, options),
        *_of_attention(architecture, options),
        *_of_sizes(architecture, found, options),
        *_of_optimizer(options),
        *_of_swapping(found, options),
        *_of_stage(architecture, options, gpu_bytes),
    )


def _of_quantisation(architecture: Architecture, options: TrainingOptions) -> Iterator[str]:
    if options.method is not Method.QLORA:
        return
    experts = experts_in_4_bits(architecture)
    if experts and options.quantize_experts:
        packed = nf4_bytes(experts, double_quant=options.double_quant)
        yield (
            f"The experts are counted in 4 bits, {packed / GIB:,.1f} GiB in all. transformers 5 keeps them as bare "
            f"parameters, which bitsandbytes does not quantise: there they are "
            f"{experts * unquantized_width(options) / GIB:,.1f} GiB. quantize_experts false counts that."
        )
    elif experts:
        yield (
            "The experts are bare parameters in transformers 5: they are not quantised, but kept as embeddings and "
            "norms are."
        )
    if options.zero_stage == 3 and options.storage is QuantStorage.UINT8:
        kept = " and keeps them, also with offload" if options.offloads_parameters else ""
        yield (
            f"ZeRO 3 cannot partition 4-bit weights stored as uint8: every GPU holds them all{kept}. "
            "quant_storage 'bf16' lets it."
        )


def _of_attention(architecture: Architecture, options: TrainingOptions) -> Iterator[str]:
    if options.attention is Attention.FLASH and options.precision is Precision.FP32:
        yield "Flash attention computes in fp16 and bf16 only: with fp32 weights it does not run. Use 'sdpa', or bf16."
    if options.attention is Attention.SDPA and not architecture.fused_attention:
        yield "This model's code in transformers has eager attention only: counted as that."
    elif options.attention is Attention.FLASH and not architecture.fused_attention:
        yield "This model's code in transformers has no flash attention; another implementation is assumed."
    elif options.attention is Attention.SDPA and architecture.attention_softcap:
        yield "This model caps its attention scores, which SDPA cannot: counted as eager attention."


def _of_sizes(architecture: Architecture, found: Weights, options: TrainingOptions) -> Iterator[str]:
    if architecture.max_positions and options.sequence_length > architecture.max_positions:
        yield (
            f"The sequence length {options.sequence_length:,} is beyond the {architecture.max_positions:,} positions "
            "that the model knows."
        )
    if found.adapters is not None and found.trained > architecture.parameters:
        yield (
            f"Adapters of rank {options.lora_rank} have {found.trained:,} parameters, more than the model's "
            f"{architecture.parameters:,}: a lower rank, or a full fine-tune, is cheaper."
        )


def _of_optimizer(options: TrainingOptions) -> Iterator[str]:
    optimizer = OPTIMIZERS[options.optimizer]
    if options.offloads_optimizer and (optimizer.paged or optimizer.eight_bit):
        yield (
            f"bitsandbytes steps {options.optimizer.value} on the GPU and wants its states there: it cannot be "
            "offloaded by ZeRO. Use 'adamw' with offload, or this optimizer without."
        )
    elif optimizer.paged:
        yield "Paged optimizer states are counted on the host: while the GPU has room, they are there."


def _of_swapping(found: Weights, options: TrainingOptions) -> Iterator[str]:
    """Where buffers of the host are no smaller than what goes to NVMe."""
    if options.offload_device is not OffloadDevice.NVME:
        return
    buffers = {part.name: part.bytes for part in swap_buffers(found, options)}
    swapped = {part.name: part.bytes for part in nvme_parts(found, options)}
    if options.offloads_optimizer and buffers["optimizer_swap_buffers"] >= swapped["offloaded_optimizer"]:
        share = partition_elements(found, options)
        yield (
            f"Swapping the optimizer takes {buffers['optimizer_swap_buffers'] / GIB:,.1f} GiB of host memory for "
            f"buffers, no less than it saves: a rank's {share:,} elements are one sub-group. Lower sub_group_size "
            f"({options.sub_group_size:,}), for example to {max(1, share // 10):,}, or offload to the CPU."
        )
    if options.offloads_parameters and buffers["parameter_swap_buffers"] >= swapped["offloaded_parameters"]:
        yield (
            f"Swapping parameters takes {buffers['parameter_swap_buffers'] / GIB:,.1f} GiB of host memory for "
            "buffers, no less than it saves: offload to the CPU."
        )


def _of_stage(architecture: Architecture, options: TrainingOptions, here: int) -> Iterator[str]:
    """Where DeepSpeed's own copies outweigh what a stage divides, found by asking for the lower one."""
    lower = _lower_stage(architecture, options)
    if lower is None:
        return
    parts, _ = gpu_parts(architecture, weights_of(architecture, lower), lower)
    there = sum(part.bytes for part in parts)
    if there < LESS * here:
        yield (
            f"ZeRO stage {lower.zero_stage} would need less on each GPU: {there / GIB:,.2f} instead of "
            f"{here / GIB:,.2f} GiB. What stage {options.zero_stage} copies, gathers or keeps twice is more than "
            "what it divides."
        )


def _lower_stage(architecture: Architecture, options: TrainingOptions) -> TrainingOptions | None:
    """The only stage that is worth asking for: one GPU divides nothing, two divide what stage 2 then keeps twice,
    and a model that stage 3 gathers whole is there whole."""
    if not options.zero_stage or options.offload is not Offload.NONE:
        return None
    stage = None
    if options.world_size == 1:
        stage = 0
    elif options.zero_stage == 3 and architecture.parameters <= options.stage3_max_live_parameters:
        stage = 2
    elif options.zero_stage == 2 and options.world_size == 2 and options.gradient_accumulation_steps > 1:
        stage = 1
    return None if stage is None else options.model_copy(update={"zero_stage": stage})
