# SPDX-License-Identifier: Apache-2.0
"""Falcon in its three shapes: 7B (one key-value head, parallel), 40B and later (grouped), RW (ALiBi, serial)."""

from __future__ import annotations

from deepspeed_provider.sizing.architecture import Architecture, Layer, NormKind, Residual
from deepspeed_provider.sizing.families.fields import HEADS, LAYERS, WIDTH, ConfigFields
from deepspeed_provider.sizing.families.parts import Sizes, fused_attention, plain_mlp


def read(fields: ConfigFields) -> Architecture:
    new_decoder = fields.flag("new_decoder_architecture", False)
    sizes = _sizes(fields, new_decoder)
    parallel = fields.flag("parallel_attn", True)
    bias = fields.flag("bias", False)
    alibi = fields.flag("alibi", False)
    norms = fields.integer("num_ln_in_parallel_attn", default=2 if new_decoder else 1) if parallel else 2
    width = fields.integer("ffn_hidden_size", default=4 * sizes.hidden)
    layer = Layer(
        count=sizes.layers,
        linears=fused_attention(sizes, module="query_key_value", out="dense", bias=bias)
        + plain_mlp(sizes.hidden, width, up="dense_h_to_4h", down="dense_4h_to_h", bias=bias),
        norm_parameters=norms * 2 * sizes.hidden,
        num_norms=norms,
        intermediate_size=width,
    )
    return Architecture(
        **sizes.common(fields, positions=2048),
        layers=(layer,),
        norm=NormKind.LAYER,
        residual=Residual.PARALLEL if parallel else Residual.PRE,
        activation=fields.text("activation", default="gelu"),
        gated_mlp=False,
        rotary_dim=0 if alibi else sizes.head_dim,
        final_norm_parameters=2 * sizes.hidden,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        alibi=alibi,
        broadcasts_key=sizes.key_value_heads == 1 and not new_decoder,
        attention_dropout=fields.number("attention_dropout", default=0.0),
        hidden_dropout=fields.number("hidden_dropout", default=0.0),
    )


def _sizes(fields: ConfigFields, new_decoder: bool) -> Sizes:
    hidden = fields.integer(*WIDTH)
    heads = fields.integer(*HEADS)
    fields.refuse_unless_divides(HEADS[0], heads, WIDTH[0], hidden)
    if new_decoder:
        key_value_heads = fields.integer("num_kv_heads", "n_head_kv", default=heads)
        fields.refuse_unless_divides("num_kv_heads", key_value_heads, HEADS[0], heads)
    else:
        key_value_heads = 1 if fields.flag("multi_query", True) else heads
    return Sizes(
        vocab=fields.integer("vocab_size"),
        hidden=hidden,
        layers=fields.layers(*LAYERS),
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=hidden // heads or 1,
    )
