# SPDX-License-Identifier: Apache-2.0
"""How many elements each parameter tensor has, in the order in which the model's modules hold them.

ZeRO cuts the parameters into equal shares, but reduces, gathers and keeps whole tensors: which of them
lie across a cut, are larger than a bucket, or stay whole, depends on their sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from deepspeed_provider.sizing.architecture import Architecture, Layer, Linear
from deepspeed_provider.sizing.lora import Adapters, embedding_projections

Sizes = tuple[int, ...]


@lru_cache(maxsize=1024)
def parameter_sizes(architecture: Architecture) -> Sizes:
    """Of all parameters, shared ones once: embeddings, each layer's matrices then its norms, the head."""
    embeddings = [
        architecture.token_embedding_parameters,
        architecture.position_rows * architecture.hidden_size,
        *_norms(architecture.embedding_norm_parameters, architecture.hidden_size),
        architecture.embedding_projection_parameters,
    ]
    layers = [size for layer in architecture.layers for size in layer.count * tuple(_of_layer(architecture, layer))]
    norms = _norms(architecture.final_norm_parameters, architecture.hidden_size)
    head = 0 if architecture.tied_embeddings else architecture.token_embedding_parameters
    bias = architecture.vocab_size if architecture.head_bias else 0
    return tuple(size for size in (*embeddings, *layers, *norms, head, bias) if size)


def adapter_sizes(adapters: Adapters) -> Sizes:
    """Of the two matrices beside each adapted one."""
    found: list[int] = []
    for layer in adapters.architecture.layers:
        inside = [size for linear in layer.linears for size in _of_adapter(adapters, linear)]
        found += layer.count * inside
    for linear in embedding_projections(adapters.architecture):
        found += _of_adapter(adapters, linear)
    return tuple(found)


def _of_layer(architecture: Architecture, layer: Layer) -> Iterator[int]:
    for linear in layer.linears:
        # Experts that are no modules lie in one tensor.
        copies = linear.copies if linear.is_module else 1
        for _ in range(copies):
            yield linear.weights // copies
            if linear.bias:
                yield linear.copies * linear.out_features // copies
    yield from _norms(layer.norm_parameters, architecture.hidden_size)
    yield layer.other_parameters


def _norms(parameters: int, hidden: int) -> list[int]:
    """Weights, or weights and biases, of hidden size each; what is left are norms of queries and keys."""
    return [hidden] * (parameters // hidden) + [parameters % hidden]


def _of_adapter(adapters: Adapters, linear: Linear) -> list[int]:
    rank = adapters.rank_of(linear)
    copies = linear.copies if linear.is_module else 1
    per_copy = rank * linear.copies // copies
    return copies * [per_copy * linear.in_features, per_copy * linear.out_features] if rank else []
