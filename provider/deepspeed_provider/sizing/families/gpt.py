# SPDX-License-Identifier: Apache-2.0
"""The GPT line: GPT-2, GPT-BigCode, GPT-Neo, GPT-J, GPT-NeoX and Pythia, OPT, BLOOM, MPT."""

from __future__ import annotations

from typing import Any

from deepspeed_provider.sizing.architecture import Architecture, Layer, Linear, NormKind, Residual
from deepspeed_provider.sizing.families.fields import ConfigFields
from deepspeed_provider.sizing.families.parts import (
    Sizes,
    fused_attention,
    plain_mlp,
    read_sizes,
    rotary_dim,
    split_attention,
)


def read_gpt2(fields: ConfigFields) -> Architecture:
    """GPT-2, and GPT-BigCode (StarCoder 1) with one key-value head for all."""
    big_code = fields.model_type == "gpt_bigcode"
    sizes = read_sizes(fields, grouped=False, own_head_dim=False)
    if big_code and fields.flag("multi_query", True):
        sizes = _multi_query(sizes)
    width = fields.integer("n_inner", default=4 * sizes.hidden)
    linears = fused_attention(sizes, module="c_attn", out="c_proj", bias=True) + plain_mlp(
        sizes.hidden, width, up="c_fc", down="c_proj", bias=True
    )
    return Architecture(
        **sizes.common(fields, positions=1024),
        **_layer_norms(sizes, linears, width),
        residual=Residual.PRE,
        activation=fields.text("activation_function", default="gelu_pytorch_tanh" if big_code else "gelu_new"),
        gated_mlp=False,
        holds_attention_output=True,
        position_rows=fields.integer("n_positions", "max_position_embeddings", default=1024),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        attention_dropout=fields.number("attn_pdrop", default=0.1),
        hidden_dropout=fields.number("resid_pdrop", default=0.1),
        embedding_dropout=fields.number("embd_pdrop", default=0.1),
    )


def read_gpt_neo(fields: ConfigFields) -> Architecture:
    sizes = read_sizes(fields, grouped=False, own_head_dim=False)
    width = fields.integer("intermediate_size", default=4 * sizes.hidden)
    linears = split_attention(sizes, out_bias=True, out="out_proj") + plain_mlp(
        sizes.hidden, width, up="c_fc", down="c_proj", bias=True
    )
    return Architecture(
        **sizes.common(fields, positions=2048),
        **_layer_norms(sizes, linears, width),
        residual=Residual.PRE,
        activation=fields.text("activation_function", default="gelu_new"),
        gated_mlp=False,
        holds_attention_output=True,
        position_rows=fields.integer("max_position_embeddings", default=2048),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        attention_dropout=fields.number("attention_dropout", default=0.0),
        hidden_dropout=fields.number("resid_dropout", default=0.0),
        embedding_dropout=fields.number("embed_dropout", default=0.0),
    )


def read_gptj(fields: ConfigFields) -> Architecture:
    sizes = read_sizes(fields, grouped=False, own_head_dim=False)
    width = fields.integer("n_inner", default=4 * sizes.hidden)
    linears = split_attention(sizes, out="out_proj") + plain_mlp(
        sizes.hidden, width, up="fc_in", down="fc_out", bias=True
    )
    return Architecture(
        **sizes.common(fields, positions=2048),
        **_layer_norms(sizes, linears, width, norms=1),
        residual=Residual.PARALLEL,
        activation=fields.text("activation_function", default="gelu_new"),
        gated_mlp=False,
        rotary_dim=fields.integer("rotary_dim", default=64, if_null=sizes.head_dim),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        head_bias=True,
        attention_dropout=fields.number("attn_pdrop", default=0.0),
        hidden_dropout=fields.number("resid_pdrop", default=0.0),
        embedding_dropout=fields.number("embd_pdrop", default=0.0),
    )


def read_gpt_neox(fields: ConfigFields) -> Architecture:
    sizes = read_sizes(fields, grouped=False, own_head_dim=False)
    width = fields.integer("intermediate_size")
    linears = fused_attention(
        sizes, module="query_key_value", out="dense", bias=fields.flag("attention_bias", True)
    ) + plain_mlp(sizes.hidden, width, up="dense_h_to_4h", down="dense_4h_to_h", bias=True)
    dropout = fields.number("hidden_dropout", default=0.0)
    return Architecture(
        **sizes.common(fields, positions=2048),
        **_layer_norms(sizes, linears, width),
        residual=Residual.PARALLEL if fields.flag("use_parallel_residual", True) else Residual.PRE,
        activation=fields.text("hidden_act", default="gelu"),
        gated_mlp=False,
        rotary_dim=rotary_dim(fields, sizes.head_dim, factor=0.25, key="rotary_pct"),
        rotary_concatenates=True,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        attention_dropout=fields.number("attention_dropout", default=0.0),
        hidden_dropout=dropout,
        embedding_dropout=dropout,
    )


def read_opt(fields: ConfigFields) -> Architecture:
    """OPT; its 350M model embeds narrower than it computes and normalises after the sum (post-norm)."""
    sizes = read_sizes(fields, grouped=False, own_head_dim=False)
    width = fields.integer("ffn_dim")
    bias = fields.flag("enable_bias", True)
    affine = 2 * sizes.hidden if fields.flag("layer_norm_elementwise_affine", True) else 0
    before = fields.flag("do_layer_norm_before", True)
    final = before and not fields.flag("_remove_final_layer_norm", False)
    embedding_width = fields.integer("word_embed_proj_dim", default=sizes.hidden)
    projected = embedding_width != sizes.hidden
    layer = Layer(
        count=sizes.layers,
        linears=split_attention(sizes, bias=bias, out="out_proj")
        + plain_mlp(sizes.hidden, width, up="fc1", down="fc2", bias=bias),
        norm_parameters=2 * affine,
        num_norms=2,
        intermediate_size=width,
    )
    return Architecture(
        **sizes.common(fields, positions=2048),
        layers=(layer,),
        norm=NormKind.LAYER,
        residual=Residual.PRE if before else Residual.POST,
        activation=fields.text("activation_function", default="relu"),
        gated_mlp=False,
        # Its position table keeps two rows that no position uses.
        position_rows=fields.integer("max_position_embeddings", default=2048) + 2,
        embedding_width=embedding_width if projected else 0,
        embedding_projection_parameters=2 * embedding_width * sizes.hidden if projected else 0,
        final_norm_parameters=affine if final else 0,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        attention_dropout=fields.number("attention_dropout", default=0.0),
        hidden_dropout=fields.number("dropout", default=0.1),
    )


def read_bloom(fields: ConfigFields) -> Architecture:
    sizes = read_sizes(fields, grouped=False, own_head_dim=False)
    width = 4 * sizes.hidden
    linears = fused_attention(sizes, module="query_key_value", out="dense", bias=True) + plain_mlp(
        sizes.hidden, width, up="dense_h_to_4h", down="dense_4h_to_h", bias=True
    )
    return Architecture(
        **sizes.common(fields, positions=2048),
        **_layer_norms(sizes, linears, width),
        residual=Residual.PRE,
        activation="bloom_gelu",
        fused_attention=False,
        gated_mlp=False,
        embedding_norm_parameters=2 * sizes.hidden,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        alibi=True,
        attention_dropout=fields.number("attention_dropout", default=0.0),
        hidden_dropout=fields.number("hidden_dropout", default=0.0),
    )


def read_mpt(fields: ConfigFields) -> Architecture:
    """MPT, after llm-foundry, which wrote these configs: biases unless ``no_bias``, ALiBi or learned positions.

    transformers builds only the published models (no biases, ALiBi) and ignores what asks for
    others; a warning says so.
    """
    sizes = read_sizes(fields, grouped=False, own_head_dim=False)
    width = fields.integer("expansion_ratio", default=4) * sizes.hidden
    attention = ConfigFields(fields.section("attn_config"))
    bias = not fields.flag("no_bias", True)
    alibi = attention.flag("alibi", True)
    learned = not alibi and fields.flag("learned_pos_emb", True)
    dropout = attention.number("attn_pdrop", default=0.0)
    fields.problems.extend(attention.problems)
    layer = Layer(
        count=sizes.layers,
        linears=fused_attention(sizes, module="Wqkv", out="out_proj", bias=bias)
        + plain_mlp(sizes.hidden, width, up="up_proj", down="down_proj", bias=bias),
        norm_parameters=(4 if bias else 2) * sizes.hidden,
        num_norms=2,
        intermediate_size=width,
    )
    unlike = [name for name, holds in (("no_bias = false", bias), ("attn_config.alibi = false", not alibi)) if holds]
    return Architecture(
        **sizes.common(fields, positions=2048),
        layers=(layer,),
        norm=NormKind.LAYER,
        residual=Residual.PRE,
        fused_attention=False,
        activation="gelu",
        gated_mlp=False,
        position_rows=fields.integer("max_seq_len", default=2048) if learned else 0,
        final_norm_parameters=(2 if bias else 1) * sizes.hidden,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        alibi=alibi,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        warnings=tuple(f"{name}: counted as llm-foundry builds it; transformers ignores it." for name in unlike),
    )


def _multi_query(sizes: Sizes) -> Sizes:
    return Sizes(
        vocab=sizes.vocab,
        hidden=sizes.hidden,
        layers=sizes.layers,
        heads=sizes.heads,
        key_value_heads=1,
        head_dim=sizes.head_dim,
    )


def _layer_norms(sizes: Sizes, linears: tuple[Linear, ...], width: int, *, norms: int = 2) -> dict[str, Any]:
    """Equal layers with ``norms`` biased LayerNorms each, and one at the end."""
    layer = Layer(
        count=sizes.layers,
        linears=linears,
        norm_parameters=norms * 2 * sizes.hidden,
        num_norms=norms,
        intermediate_size=width,
    )
    return {"layers": (layer,), "norm": NormKind.LAYER, "final_norm_parameters": 2 * sizes.hidden}
