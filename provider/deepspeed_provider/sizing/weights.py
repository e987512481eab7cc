# SPDX-License-Identifier: Apache-2.0
"""Which weights a fine-tune trains, which it only reads, and in which precision each is kept."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_provider.sizing.architecture import Architecture, Layer
from deepspeed_provider.sizing.lora import Adapters, adapters
from deepspeed_provider.sizing.options import Method, Precision, QuantStorage, TrainingOptions
from deepspeed_provider.sizing.states import PRECISIONS, Widths, packed_bytes, scale_bytes
from deepspeed_provider.sizing.tensor_sizes import Sizes, adapter_sizes, parameter_sizes


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Parameters and bytes of one whole copy, before any partitioning."""

    trained: int
    trained_precision: Precision
    frozen: int  # parameters read only and not quantised
    frozen_width: int
    quantized: int  # parameters in 4 bits
    packed_bytes: int  # of these, without scales
    scale_bytes: int
    adapters: Adapters | None
    trained_sizes: Sizes  # elements of each trained tensor
    frozen_sizes: Sizes  # of each tensor of the base model under adapters, quantised ones among them

    @property
    def quantized_bytes(self) -> int:
        return self.packed_bytes + self.scale_bytes

    @property
    def widths(self) -> Widths:
        """Bytes per trained parameter."""
        return PRECISIONS[self.trained_precision]


def weights(architecture: Architecture, options: TrainingOptions) -> Weights:
    """Raises :class:`SpecError` for LoRA targets that the model does not have."""
    if options.method is Method.FULL:
        return Weights(
            trained=architecture.parameters,
            trained_precision=options.precision,
            frozen=0,
            frozen_width=0,
            quantized=0,
            packed_bytes=0,
            scale_bytes=0,
            adapters=None,
            trained_sizes=parameter_sizes(architecture),
            frozen_sizes=(),
        )
    found = adapters(architecture, rank=options.lora_rank, targets=options.lora_targets)
    quantized = quantizable(architecture, options) if options.method is Method.QLORA else 0
    return Weights(
        trained=found.parameters,
        trained_precision=adapter_precision(options),
        frozen=architecture.parameters - quantized,
        frozen_width=unquantized_width(options),
        quantized=quantized,
        packed_bytes=packed_bytes(quantized),
        scale_bytes=scale_bytes(quantized, double_quant=options.double_quant),
        adapters=found,
        trained_sizes=adapter_sizes(found),
        frozen_sizes=parameter_sizes(architecture),
    )


def adapter_precision(options: TrainingOptions) -> Precision:
    """As the adapters are while they train."""
    return options.precision if engine_casts(options) else options.adapters


def engine_casts(options: TrainingOptions) -> bool:
    """Whether DeepSpeed's engine turns every parameter that is not quantised into fp16 or bf16
    (runtime/engine.py, _cast_module_mixed_precision). Without ZeRO an ordinary training loop is assumed."""
    return options.zero_stage > 0 and options.precision in (Precision.FP16, Precision.BF16)


def quantizable(architecture: Architecture, options: TrainingOptions) -> int:
    """Weights of linear modules in the layers and beside narrower embeddings; bitsandbytes leaves out the head,
    and bare parameters, of which experts are quantised all the same where the options say so."""
    return architecture.embedding_projection_parameters + sum(
        layer.count * quantizable_in(layer, options) for layer in architecture.layers
    )


def quantizable_in(layer: Layer, options: TrainingOptions) -> int:
    """Of one layer."""
    return sum(linear.weights for linear in layer.linears if linear.is_module) + (
        _experts_in(layer) if options.quantize_experts else 0
    )


def experts_in_4_bits(architecture: Architecture) -> int:
    """Weights of experts that are bare parameters: in 4 bits only where the options say so."""
    return sum(layer.count * _experts_in(layer) for layer in architecture.layers)


def _experts_in(layer: Layer) -> int:
    return sum(linear.weights for linear in layer.linears if not linear.is_module and linear.role != "router")


def partitions_packed(options: TrainingOptions) -> bool:
    """Whether stage 3 cuts, gathers and offloads weights in 4 bits: only as floating-point numbers."""
    return options.zero_stage == 3 and options.storage is not QuantStorage.UINT8


def unquantized_width(options: TrainingOptions) -> int:
    """PEFT's ``prepare_model_for_kbit_training`` turns embeddings, head, norms and biases into fp32,
    unless an engine turns them back."""
    if options.method is Method.QLORA and options.upcasts and not engine_casts(options):
        return PRECISIONS[Precision.FP32].weight
    return PRECISIONS[options.precision].weight
