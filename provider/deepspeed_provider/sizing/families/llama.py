# SPDX-License-Identifier: Apache-2.0
"""Llama and its kin: split attention with rotary positions, RMS norms, a gated MLP.

One row says in what a family differs from Llama; the names and defaults are those of the
configuration classes and modeling files of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from deepspeed_provider.sizing.architecture import Architecture, Layer, Linear, NormKind, QkNorm, Residual
from deepspeed_provider.sizing.families.fields import REQUIRED, ConfigFields
from deepspeed_provider.sizing.families.parts import (
    Sizes,
    fused_attention,
    gated_mlp,
    read_sizes,
    split_attention,
)


@dataclass(frozen=True, kw_only=True)
class Kin:
    """In what a family differs from Llama.

    ``qkv_bias`` and ``out_bias`` are a constant, or the config's flag that decides (False when absent).
    """

    key_value_heads: int | None = None
    head_dim: int | None = None
    vocab: int = REQUIRED
    heads: int = REQUIRED
    qkv_bias: bool | str = "attention_bias"
    out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    norm: NormKind = NormKind.RMS
    norms: int = 2
    bare_norms: bool = False  # norms without weights
    residual: Residual = Residual.PRE
    qk_norm: QkNorm = QkNorm.NONE
    tied: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    qk_norm_flag: str = ""  # decides on a norm of each head's own weights
    positions: int = 2048
    embedding_scale: bool = False
    final_softcap: bool = False
    attention_softcap: bool = False


_GEMMA: Final = Kin(
    norm=NormKind.RMS_UNIT_OFFSET,
    tied=True,
    activation="gelu_pytorch_tanh",
    embedding_scale=True,
    head_dim=256,
    key_value_heads=16,
    positions=8192,
)
_GEMMA2: Final = replace(
    _GEMMA,
    key_value_heads=4,
    norms=4,
    residual=Residual.SANDWICH,
    activation_key="hidden_activation",
    final_softcap=True,
    attention_softcap=True,
)

KIN: Final[Mapping[str, Kin]] = MappingProxyType(
    {
        "llama": Kin(mlp_bias="mlp_bias"),
        "mistral": Kin(key_value_heads=8, qkv_bias=False, out_bias=False, positions=131_072),
        "ministral": Kin(key_value_heads=8, qkv_bias=False, out_bias=False, positions=131_072),
        "ministral3": Kin(key_value_heads=8, head_dim=128, qkv_bias=False, out_bias=False, positions=262_144),
        "qwen2": Kin(key_value_heads=32, qkv_bias=True, out_bias=False, positions=32_768),
        "qwen3": Kin(key_value_heads=32, head_dim=128, qk_norm=QkNorm.HEAD, positions=32_768),
        "gemma": _GEMMA,
        "gemma2": _GEMMA2,
        # The text half of published Gemma 3 configs leaves out what equals the class's defaults.
        "gemma3_text": replace(
            _GEMMA2,
            vocab=262_208,
            heads=8,
            qk_norm=QkNorm.HEAD,
            positions=131_072,
            final_softcap=False,
            attention_softcap=False,
        ),
        # Multiplies by the weight before it casts back, as Gemma does: fp32 throughout.
        "olmo2": Kin(norm=NormKind.RMS_UNIT_OFFSET, residual=Residual.POST, qk_norm=QkNorm.WIDTH),
        "olmo3": Kin(norm=NormKind.RMS_UNIT_OFFSET, residual=Residual.POST, qk_norm=QkNorm.WIDTH),
        "olmo": Kin(norm=NormKind.LAYER, bare_norms=True),
        # Their LayerNorm without bias is written out in fp32, like an RMS norm.
        "cohere": Kin(norms=1, residual=Residual.PARALLEL, tied=True, positions=8192, qk_norm_flag="use_qk_norm"),
        "cohere2": Kin(norms=1, residual=Residual.PARALLEL, tied=True, positions=8192),
        "smollm3": Kin(key_value_heads=4, mlp_bias="mlp_bias", tied=True, positions=32_768),
        "granite": Kin(mlp_bias="mlp_bias", embedding_scale=True),
    }
)


def read(fields: ConfigFields) -> Architecture:
    kin = KIN[fields.model_type]
    sizes = read_sizes(
        fields, key_value_heads=kin.key_value_heads, head_dim=kin.head_dim, vocab=kin.vocab, heads=kin.heads
    )
    width = fields.integer("intermediate_size")
    attention = split_attention(sizes, bias=_decided(fields, kin.qkv_bias), out_bias=_decided(fields, kin.out_bias))
    own_qk_norms = bool(kin.qk_norm_flag) and fields.flag(kin.qk_norm_flag, False)
    kin = replace(kin, qk_norm=QkNorm.HEAD) if own_qk_norms else kin
    qk_norms = sizes.query + sizes.key_value if own_qk_norms else qk_norm_parameters(kin.qk_norm, sizes)
    layer = Layer(
        count=sizes.layers,
        linears=attention + gated_mlp(sizes.hidden, width, bias=_decided(fields, kin.mlp_bias)),
        norm_parameters=(0 if kin.bare_norms else kin.norms * sizes.hidden) + qk_norms,
        num_norms=kin.norms,
        intermediate_size=width,
    )
    return assemble(fields, sizes, kin, (layer,))


def read_first_qwen(fields: ConfigFields) -> Architecture:
    """Qwen 1, whose code comes with the model: one biased query-key-value matrix, an MLP of half the width named."""
    sizes = read_sizes(fields, grouped=False, own_head_dim=False)
    width = fields.integer("intermediate_size", minimum=2) // 2
    hidden = sizes.hidden
    query_key_value, output = fused_attention(sizes, module="c_attn", out="c_proj", bias=True)
    mlp = (
        Linear(role="gate", module="w2", in_features=hidden, out_features=width),
        Linear(role="up", module="w1", in_features=hidden, out_features=width),
        Linear(role="down", module="c_proj", in_features=width, out_features=hidden),
    )
    layer = Layer(
        count=sizes.layers,
        linears=(query_key_value, replace(output, bias=False), *mlp),
        norm_parameters=2 * hidden,
        num_norms=2,
        intermediate_size=width,
    )
    return assemble(fields, sizes, Kin(positions=8192), (layer,))


def assemble(fields: ConfigFields, sizes: Sizes, kin: Kin, layers: tuple[Layer, ...]) -> Architecture:
    """An architecture of Llama's kin around these layers."""
    return Architecture(
        **sizes.common(fields, positions=kin.positions),
        layers=layers,
        norm=kin.norm,
        residual=kin.residual,
        activation=_activation(fields, kin),
        gated_mlp=True,
        qk_norm=kin.qk_norm,
        rotary_dim=sizes.head_dim,
        final_norm_parameters=0 if kin.bare_norms else sizes.hidden,
        tied_embeddings=fields.flag("tie_word_embeddings", kin.tied),
        logit_softcap=fields.is_set("final_logit_softcapping", kin.final_softcap),
        attention_softcap=fields.is_set("attn_logit_softcapping", kin.attention_softcap),
        embedding_scale=kin.embedding_scale,
        attention_dropout=fields.number("attention_dropout", default=0.0),
    )


def qk_norm_parameters(kind: QkNorm, sizes: Sizes) -> int:
    """Of one layer's norms of queries and keys."""
    match kind:
        case QkNorm.HEAD:
            return 2 * sizes.head_dim
        case QkNorm.WIDTH:
            return sizes.query + sizes.key_value
        case _:
            return 0


def _decided(fields: ConfigFields, bias: bool | str) -> bool:
    return fields.flag(bias, False) if isinstance(bias, str) else bias


def _activation(fields: ConfigFields, kin: Kin) -> str:
    name = fields.text(kin.activation_key, default=kin.activation)
    # Gemma's first configs say gelu and mean its tanh approximation; its config class corrects that.
    return "gelu_pytorch_tanh" if fields.model_type == "gemma" and name == "gelu" else name
