# SPDX-License-Identifier: Apache-2.0
"""Architectures that are assumed, not read: of an unknown model type, or from a parameter count alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.sizing.architecture import Architecture, Experts, Layer, NormKind, Residual
from deepspeed_provider.sizing.families.fields import HEADS, LAYERS, WIDTH, ConfigFields
from deepspeed_provider.sizing.families.llama import Kin, assemble
from deepspeed_provider.sizing.families.parts import Sizes, experts_mlp, gated_mlp, read_sizes, split_attention

_NUM_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
_MLP_WIDTH: Final = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")

SMALLEST_PARAMETER_COUNT: Final = 1_000_000
TIED_BELOW: Final = 4_000_000_000
HEAD_DIM: Final = 128
WIDTH_PER_LAYER: Final = 128


def looks_like_decoder(config: Mapping[str, Any]) -> bool:
    """Whether the config has the numbers that every decoder has."""
    return all(any(name in config for name in names) for names in (WIDTH, LAYERS, HEADS, ("vocab_size",)))


def read_unknown(fields: ConfigFields) -> Architecture:
    """As if it were Llama (split attention, gated MLP of silu, RMS norms), with experts where the config has them."""
    sizes = read_sizes(fields, head_dim=_head_dim(fields))
    width = fields.integer(*_MLP_WIDTH, default=4 * sizes.hidden)
    bias = fields.flag("attention_bias", False)
    attention = split_attention(sizes, bias=bias)
    num_experts = fields.integer(*_NUM_EXPERTS, default=0, minimum=0) if fields.flag("is_moe", True) else 0
    layers = []
    dense = min(fields.integer("first_k_dense_replace", default=0, minimum=0), sizes.layers)
    dense = dense if num_experts > 1 else sizes.layers
    if dense:
        layers.append(_dense_layer(sizes, attention + gated_mlp(sizes.hidden, width), dense, width))
    if dense < sizes.layers:
        layers.append(_expert_layer(fields, sizes, attention, num_experts, sizes.layers - dense, width))
    architecture = assemble(fields, sizes, Kin(), tuple(layers))
    kind = "a mixture of experts of Llama's kin" if num_experts > 1 else "Llama"
    assumption = (
        f"model_type = {fields.model_type!r} is not known: it is sized as if it were {kind}"
        " (separate query, key, value and output matrices, a gated MLP, RMS norms, rotary positions);"
        " its parameter count is an estimate, a quarter or more beside the truth where its MLP or its attention is of"
        " another kind. Give the parameter count if you know it."
    )
    return dataclasses.replace(architecture, warnings=(assumption,))


def _head_dim(fields: ConfigFields) -> int | None:
    """Of heads whose width is told otherwise, or does not follow from the hidden size."""
    told = fields.integer("v_head_dim", default=0, minimum=0)
    heads, hidden = fields.integer(*HEADS), fields.integer(*WIDTH)
    return told or (None if hidden % heads == 0 else -(-hidden // heads))


def _dense_layer(sizes: Sizes, linears: Any, count: int, width: int) -> Layer:
    return Layer(count=count, linears=linears, norm_parameters=2 * sizes.hidden, num_norms=2, intermediate_size=width)


def _expert_layer(
    fields: ConfigFields, sizes: Sizes, attention: Any, num_experts: int, count: int, dense_width: int
) -> Layer:
    width = fields.integer("moe_intermediate_size", default=dense_width)
    shared_width = fields.integer(
        "shared_expert_intermediate_size", default=width * fields.integer("n_shared_experts", default=0, minimum=0)
    )
    shared = gated_mlp(sizes.hidden, shared_width, shared=True) if shared_width else ()
    return Layer(
        count=count,
        linears=attention + experts_mlp(sizes.hidden, width, num_experts) + shared,
        norm_parameters=2 * sizes.hidden,
        num_norms=2,
        intermediate_size=width,
        experts=Experts(
            num_experts=num_experts,
            experts_per_token=min(fields.integer(*_PER_TOKEN, default=2), num_experts),
            width=width,
            shared_width=shared_width,
        ),
    )


def from_parameter_count(parameters: int, *, vocab_size: int = 128_256) -> Architecture:
    """A Llama-like model of exactly so many parameters, when nothing else is known.

    The rule is the shape that published models keep: hidden size = 128 x layers (rounded to heads of
    128), an MLP about 8/3 as wide as the hidden size, as many key-value heads as heads, embeddings
    tied below 4 billion parameters. The hidden size is the largest whose attention, embeddings and
    MLP fit; the MLP then takes up the rest, and what does not divide is spread over the layers.
    Raises :class:`SpecError` for a count below one million, or too small for the vocabulary.
    """
    _refuse_unusable_count(parameters)
    tied = parameters < TIED_BELOW
    hidden = HEAD_DIM
    while _llama_like(hidden + HEAD_DIM, vocab_size, tied, _usual_width(hidden + HEAD_DIM)).parameters <= parameters:
        hidden += HEAD_DIM
    bare = _llama_like(hidden, vocab_size, tied, 0)
    per_width = bare.num_layers * 3 * hidden
    width = (parameters - bare.parameters) // per_width
    if width < 1:
        raise SpecError(
            [
                FieldProblem(
                    field="parameters",
                    value=parameters,
                    problem=f"is too few for a vocabulary of {vocab_size}",
                    suggestion=f"Give a config, or at least {bare.parameters + per_width}.",
                )
            ]
        )
    shaped = _llama_like(hidden, vocab_size, tied, width)
    return dataclasses.replace(
        shaped,
        layers=_spread(shaped.layers[0], parameters - shaped.parameters),
        warnings=(
            f"Only the parameter count {parameters} is known: a Llama-like shape of {shaped.num_layers} layers,"
            f" hidden size {hidden}, MLP width {width} and vocabulary {vocab_size} is assumed;"
            " activations and adapters are estimates.",
        ),
    )


def _refuse_unusable_count(parameters: int) -> None:
    if isinstance(parameters, bool) or not isinstance(parameters, int) or parameters < SMALLEST_PARAMETER_COUNT:
        raise SpecError(
            [
                FieldProblem(
                    field="parameters",
                    value=parameters,
                    problem="is not a usable parameter count",
                    suggestion=f"Use a whole number of at least {SMALLEST_PARAMETER_COUNT}, such as 7000000000.",
                )
            ]
        )


def _usual_width(hidden: int) -> int:
    return 8 * hidden // 3


def _llama_like(hidden: int, vocab_size: int, tied: bool, width: int) -> Architecture:
    heads = hidden // HEAD_DIM
    sizes = Sizes(
        vocab=vocab_size,
        hidden=hidden,
        layers=max(1, hidden // WIDTH_PER_LAYER),
        heads=heads,
        key_value_heads=heads,
        head_dim=HEAD_DIM,
    )
    layer = _dense_layer(sizes, split_attention(sizes) + gated_mlp(hidden, width), sizes.layers, width)
    return Architecture(
        model_type="",
        vocab_size=vocab_size,
        hidden_size=hidden,
        layers=(layer,),
        num_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_DIM,
        norm=NormKind.RMS,
        residual=Residual.PRE,
        activation="silu",
        gated_mlp=True,
        rotary_dim=HEAD_DIM,
        final_norm_parameters=hidden,
        tied_embeddings=tied,
        max_positions=8192,
    )


def _spread(layer: Layer, rest: int) -> tuple[Layer, ...]:
    """``layer`` with ``rest`` more parameters over all its copies, as evenly as whole numbers allow."""
    each, over = divmod(rest, layer.count)
    more = dataclasses.replace(layer, count=over, other_parameters=each + 1)
    fewer = dataclasses.replace(layer, count=layer.count - over, other_parameters=each)
    return (more, fewer) if over else (fewer,)
