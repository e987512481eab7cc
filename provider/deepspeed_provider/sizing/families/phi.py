# SPDX-License-Identifier: Apache-2.0
"""Phi 1.5 and 2 (parallel, biases everywhere), Phi 3 and 4 (fused Llama), StarCoder2, StableLM, GLM."""

from __future__ import annotations

from deepspeed_provider.sizing.architecture import Architecture, Layer, NormKind, QkNorm, Residual
from deepspeed_provider.sizing.families.fields import ConfigFields
from deepspeed_provider.sizing.families.parts import (
    fused_attention,
    fused_gated_mlp,
    gated_mlp,
    plain_mlp,
    read_sizes,
    rotary_dim,
    split_attention,
)


def read_phi(fields: ConfigFields) -> Architecture:
    sizes = read_sizes(fields)
    width = fields.integer("intermediate_size")
    qk_norm = fields.flag("qk_layernorm", False)
    # Their norms span hidden_size / heads, whatever head_dim says.
    qk_norm_parameters = 4 * (sizes.hidden // sizes.heads) if qk_norm else 0
    layer = Layer(
        count=sizes.layers,
        linears=split_attention(sizes, bias=True, out="dense")
        + plain_mlp(sizes.hidden, width, up="fc1", down="fc2", bias=True),
        norm_parameters=2 * sizes.hidden + qk_norm_parameters,
        num_norms=1,
        intermediate_size=width,
    )
    return Architecture(
        **sizes.common(fields, positions=2048),
        layers=(layer,),
        norm=NormKind.LAYER,
        residual=Residual.PARALLEL,
        activation=fields.text("hidden_act", default="gelu_new"),
        gated_mlp=False,
        qk_norm=QkNorm.HEAD if qk_norm else QkNorm.NONE,
        rotary_dim=rotary_dim(fields, sizes.head_dim, factor=0.5),
        rotary_concatenates=True,
        final_norm_parameters=2 * sizes.hidden,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        head_bias=True,
        attention_dropout=fields.number("attention_dropout", default=0.0),
        hidden_dropout=fields.number("resid_pdrop", default=0.0),
        embedding_dropout=fields.number("embd_pdrop", default=0.0),
    )


def read_phi3(fields: ConfigFields) -> Architecture:
    sizes = read_sizes(fields)
    width = fields.integer("intermediate_size")
    layer = Layer(
        count=sizes.layers,
        linears=fused_attention(sizes, module="qkv_proj", out="o_proj", bias=False)
        + fused_gated_mlp(sizes.hidden, width),
        norm_parameters=2 * sizes.hidden,
        num_norms=2,
        intermediate_size=width,
    )
    return Architecture(
        **sizes.common(fields, positions=4096),
        layers=(layer,),
        norm=NormKind.RMS,
        residual=Residual.PRE,
        activation=fields.text("hidden_act", default="silu"),
        gated_mlp=True,
        rotary_dim=rotary_dim(fields, sizes.head_dim),
        rotary_concatenates=True,
        final_norm_parameters=sizes.hidden,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        attention_dropout=fields.number("attention_dropout", default=0.0),
        hidden_dropout=fields.number("resid_pdrop", default=0.0),
    )


def read_starcoder2(fields: ConfigFields) -> Architecture:
    sizes = read_sizes(fields, key_value_heads=2)
    width = fields.integer("intermediate_size")
    bias = fields.flag("use_bias", True)
    layer = Layer(
        count=sizes.layers,
        linears=split_attention(sizes, bias=bias) + plain_mlp(sizes.hidden, width, up="c_fc", down="c_proj", bias=bias),
        norm_parameters=4 * sizes.hidden,
        num_norms=2,
        intermediate_size=width,
    )
    return Architecture(
        **sizes.common(fields, positions=4096),
        layers=(layer,),
        norm=NormKind.LAYER,
        residual=Residual.PRE,
        activation=fields.text("hidden_act", default="gelu_pytorch_tanh"),
        gated_mlp=False,
        rotary_dim=sizes.head_dim,
        final_norm_parameters=2 * sizes.hidden,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        attention_dropout=fields.number("attention_dropout", default=0.0),
        hidden_dropout=fields.number("residual_dropout", default=0.0),
        embedding_dropout=fields.number("embedding_dropout", default=0.0),
    )


def read_stablelm(fields: ConfigFields) -> Architecture:
    sizes = read_sizes(fields, key_value_heads=32, own_head_dim=False)
    width = fields.integer("intermediate_size")
    parallel = fields.flag("use_parallel_residual", False)
    qk_norm = fields.flag("qk_layernorm", False)
    norms = 1 if parallel else 2
    layer = Layer(
        count=sizes.layers,
        linears=split_attention(sizes, bias=fields.flag("use_qkv_bias", False), out_bias=False)
        + gated_mlp(sizes.hidden, width),
        # Each head has a norm weight of its own, without bias.
        norm_parameters=norms * 2 * sizes.hidden + (sizes.query + sizes.key_value if qk_norm else 0),
        num_norms=norms,
        intermediate_size=width,
    )
    return Architecture(
        **sizes.common(fields, positions=4096),
        layers=(layer,),
        norm=NormKind.LAYER,
        residual=Residual.PARALLEL if parallel else Residual.PRE,
        activation=fields.text("hidden_act", default="silu"),
        gated_mlp=True,
        qk_norm=QkNorm.HEAD if qk_norm else QkNorm.NONE,
        rotary_dim=rotary_dim(fields, sizes.head_dim, factor=0.25),
        rotary_concatenates=True,
        final_norm_parameters=2 * sizes.hidden,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        attention_dropout=fields.number("attention_dropout", default=0.0),
        hidden_dropout=fields.number("hidden_dropout", default=0.0),
    )


def read_glm(fields: ConfigFields) -> Architecture:
    """GLM, and GLM 4 with norms on both sides of attention and MLP."""
    sandwich = fields.model_type == "glm4"
    sizes = read_sizes(fields, key_value_heads=2, head_dim=128)
    width = fields.integer("intermediate_size")
    norms = 4 if sandwich else 2
    layer = Layer(
        count=sizes.layers,
        linears=split_attention(sizes, bias=fields.flag("attention_bias", True), out_bias=False)
        + fused_gated_mlp(sizes.hidden, width),
        norm_parameters=norms * sizes.hidden,
        num_norms=norms,
        intermediate_size=width,
    )
    return Architecture(
        **sizes.common(fields, positions=131_072),
        layers=(layer,),
        norm=NormKind.RMS,
        residual=Residual.SANDWICH if sandwich else Residual.PRE,
        activation=fields.text("hidden_act", default="silu"),
        gated_mlp=True,
        rotary_dim=rotary_dim(fields, sizes.head_dim, factor=0.5),
        rotary_concatenates=True,
        final_norm_parameters=sizes.hidden,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        attention_dropout=fields.number("attention_dropout", default=0.0),
    )
