# SPDX-License-Identifier: Apache-2.0
"""What an estimate assumes, and what its reader should know."""

from __future__ import annotations

from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.options import Attention, Loss, Method, Padding, Precision, QuantStorage, TrainingOptions
from deepspeed_provider.sizing.states import OPTIMIZERS, PRECISIONS
from deepspeed_provider.sizing.weights import Weights, engine_casts


def assumptions(options: TrainingOptions) -> tuple[str, ...]:
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
    if not options.zero_stage and options.world_size > 1:
        found.append("Without ZeRO, DeepSpeed's engine still reduces gradients in a flat copy, once a step.")
        if PRECISIONS[options.precision].master:
            found.append("It also casts all of them to fp32 for the optimizer's step.")
    found += _of_adapters(options)
    return tuple(found)


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


def warnings(architecture: Architecture, found: Weights, options: TrainingOptions) -> tuple[str, ...]:
    """What may surprise: unknown architectures, combinations that do not do what they seem to."""
    warned = list(architecture.warnings)
    if found.adapters is not None:
        warned += found.adapters.warnings
    if options.method is Method.QLORA and architecture.expert_parameters:
        warned.append(
            "The experts are bare parameters in transformers 5: they are not quantised, but kept as embeddings and "
            "norms are."
        )
    if options.method is Method.QLORA and options.zero_stage == 3 and options.storage is QuantStorage.UINT8:
        warned.append(
            "ZeRO 3 cannot partition 4-bit weights stored as uint8: every GPU holds them all. "
            "quant_storage 'bf16' lets it."
        )
    if options.attention is Attention.SDPA and not architecture.fused_attention:
        warned.append("This model's code in transformers has eager attention only: counted as that.")
    elif options.attention is Attention.FLASH and not architecture.fused_attention:
        warned.append("This model's code in transformers has no flash attention; another implementation is assumed.")
    elif options.attention is Attention.SDPA and architecture.attention_softcap:
        warned.append("This model caps its attention scores, which SDPA cannot: counted as eager attention.")
    if architecture.max_positions and options.sequence_length > architecture.max_positions:
        warned.append(
            f"The sequence length {options.sequence_length:,} is beyond the {architecture.max_positions:,} positions "
            "that the model knows."
        )
    if OPTIMIZERS[options.optimizer].paged:
        warned.append("Paged optimizer states are counted on the host: while the GPU has room, they are there.")
    return tuple(warned)
