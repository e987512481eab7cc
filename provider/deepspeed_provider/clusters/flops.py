# SPDX-License-Identifier: Apache-2.0
"""Work of one token: FLOPs of products and attention, bytes that move through the GPU's memory.

A product costs 2 FLOPs per weight, once forward, once for its input's gradient and once for its weight's
(Kaplan et al. 2020: 6 P in all); attention over a sequence of s costs 12 L h s (Narayanan et al. 2021), counting
the whole square of scores as published utilisations do. Frozen weights have no gradient; checkpointing runs the
layers' forward a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from deepspeed_provider.sizing.architecture import Architecture, Layer, Linear
from deepspeed_provider.sizing.options import Method, Precision, TrainingOptions
from deepspeed_provider.sizing.weights import Weights

# bitsandbytes unpacks a 4-bit weight before each product: half a byte read, two written.
DEQUANTISED_BYTES: Final = 2.5


@dataclass(frozen=True, kw_only=True)
class TokenWork:
    """Of one token in one forward and backward pass.

    Attributes:
        model_flops: what the result needs, recomputation left out: utilisation is counted in these.
        matmul_flops: of linears, head and adapters, recomputation included.
        attention_flops: of scores and their product with the values, recomputation included.
        activation_elements: inputs and outputs of all linears, weighted by the share of the passes that
            meet them; a forward and backward pass without recomputation weighs 1.
        scores: attention scores, weighted alike.
        logits: of the head.
        adapters: in all layers.
    """

    model_flops: float
    matmul_flops: float
    attention_flops: float
    activation_elements: float
    scores: float
    logits: int
    adapters: int


def token_work(architecture: Architecture, found: Weights, options: TrainingOptions) -> TokenWork:
    """Of the model trained this way."""
    layers, head = layer_weights(architecture), head_weights(architecture)
    adapted = adapter_weights(architecture, found)
    base_passes = 6 if options.method is Method.FULL else 4
    useful = base_passes * (layers + head) + 6 * adapted
    attention = attention_flops(architecture, options.sequence_length)
    again = options.gradient_checkpointing
    recomputed = (2 * (layers + adapted), attention / 3) if again else (0, 0)
    weight = 4 / 3 if again else 1  # forward is a third
    return TokenWork(
        model_flops=useful + attention,
        matmul_flops=useful + recomputed[0],
        attention_flops=attention + recomputed[1],
        activation_elements=weight * (activation_width(architecture) + adapter_width(architecture, found)),
        scores=weight * architecture.num_layers * architecture.num_heads * options.sequence_length,
        logits=architecture.vocab_size,
        adapters=adapters_in_layers(architecture, found),
    )


def layer_weights(architecture: Architecture) -> float:
    """Weights that one token is multiplied with in all layers; of experts only those it is sent to."""
    return sum(count * share * linear.weights for count, share, linear in _linears(architecture))


def head_weights(architecture: Architecture) -> int:
    """Shared with the embedding or not: looking a token up costs nothing, the head's product does."""
    return architecture.token_embedding_parameters


def attention_flops(architecture: Architecture, sequence_length: int) -> float:
    """12 L h s: two products forward, four backward, each 2 h s."""
    return 12.0 * architecture.num_layers * architecture.query_width * sequence_length


def adapter_weights(architecture: Architecture, found: Weights) -> float:
    """Of LoRA, that one token passes through."""
    if found.adapters is None:
        return 0
    return sum(count * share * found.adapters.parameters_of(linear) for count, share, linear in _linears(architecture))


def activation_width(architecture: Architecture) -> float:
    """Inputs and outputs of all linears that one token passes through."""
    return sum(
        count * share * linear.copies * (linear.in_features + linear.out_features)
        for count, share, linear in _linears(architecture)
    )


def adapter_width(architecture: Architecture, found: Weights) -> float:
    """Inputs and outputs of both of an adapter's matrices."""
    if found.adapters is None:
        return 0
    return sum(
        count * share * linear.copies * (linear.in_features + linear.out_features + 2 * rank)
        for count, share, linear in _linears(architecture)
        if (rank := found.adapters.rank_of(linear))
    )


def adapters_in_layers(architecture: Architecture, found: Weights) -> int:
    """Number of adapted matrices in all layers."""
    if found.adapters is None:
        return 0
    return sum(count for count, _, linear in _linears(architecture) if found.adapters.rank_of(linear))


def weight_bytes_moved(found: Weights, options: TrainingOptions) -> float:
    """Bytes of weights and gradients through the GPU's memory in one micro-step, whatever its number of tokens."""
    reads = 3 if options.gradient_checkpointing else 2
    width = 4 if options.precision is Precision.FP32 else 2
    trained = found.trained * (found.widths.weight * reads + 2 * found.widths.gradient)
    quantised = found.quantized * (DEQUANTISED_BYTES + width) * reads
    return trained + found.frozen * found.frozen_width * reads + quantised


def _linears(architecture: Architecture) -> Iterator[tuple[int, float, Linear]]:
    """(layers, share of the copies that a token meets, linear) of each linear."""
    for layer in architecture.layers:
        for linear in layer.linears:
            yield layer.count, _share(layer, linear), linear


def _share(layer: Layer, linear: Linear) -> float:
    if layer.experts is None or linear.copies == 1:
        return 1.0
    return layer.experts.experts_per_token / layer.experts.num_experts
