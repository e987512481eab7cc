# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of Llama's kin: Mixtral, Qwen2-MoE, Qwen3-MoE.

transformers 5.24 keeps all experts of a layer in two three-dimensional parameters, and the router
in a module of its own: neither is an nn.Linear, so neither is quantised, nor found by its type.
"""

from __future__ import annotations

from dataclasses import replace

from deepspeed_provider.sizing.architecture import Architecture, Experts, Layer, Linear, QkNorm
from deepspeed_provider.sizing.families.fields import ConfigFields
from deepspeed_provider.sizing.families.llama import Kin, assemble, qk_norm_parameters
from deepspeed_provider.sizing.families.parts import Sizes, experts_mlp, gated_mlp, read_sizes, split_attention


def read_mixtral(fields: ConfigFields) -> Architecture:
    kin = Kin(key_value_heads=8, positions=131_072)
    sizes = read_sizes(fields, key_value_heads=kin.key_value_heads)
    width = fields.integer("intermediate_size")
    num_experts = fields.integer("num_local_experts", "num_experts", default=8)
    layer = Layer(
        count=sizes.layers,
        linears=split_attention(sizes) + experts_mlp(sizes.hidden, width, num_experts),
        norm_parameters=2 * sizes.hidden,
        num_norms=2,
        intermediate_size=width,
        experts=Experts(
            num_experts=num_experts,
            experts_per_token=fields.integer("num_experts_per_tok", default=2),
            width=width,
        ),
    )
    return replace(assemble(fields, sizes, kin, (layer,)), routes_in_fp32=True)


def read_qwen2_moe(fields: ConfigFields) -> Architecture:
    kin = Kin(positions=32_768)
    sizes = read_sizes(fields, key_value_heads=16)
    attention = split_attention(sizes, bias=fields.flag("qkv_bias", True), out_bias=False)
    shared_width = fields.integer("shared_expert_intermediate_size", default=5632)
    shared = (
        *gated_mlp(sizes.hidden, shared_width, shared=True),
        Linear(role="shared_expert_gate", module="shared_expert_gate", in_features=sizes.hidden, out_features=1),
    )
    experts = _experts(fields, num_experts=60, per_token=4, width=1408, shared_width=shared_width)
    return assemble(fields, sizes, kin, _layers(fields, sizes, kin, attention, experts, shared))


def read_qwen3_moe(fields: ConfigFields) -> Architecture:
    kin = Kin(positions=32_768, qk_norm=QkNorm.HEAD)
    sizes = read_sizes(fields, key_value_heads=4)
    attention = split_attention(sizes, bias=fields.flag("attention_bias", False))
    experts = _experts(fields, num_experts=128, per_token=8, width=768)
    return assemble(fields, sizes, kin, _layers(fields, sizes, kin, attention, experts, ()))


def _experts(fields: ConfigFields, *, num_experts: int, per_token: int, width: int, shared_width: int = 0) -> Experts:
    return Experts(
        num_experts=fields.integer("num_experts", "num_local_experts", default=num_experts, minimum=0),
        experts_per_token=fields.integer("num_experts_per_tok", default=per_token),
        width=fields.integer("moe_intermediate_size", default=width),
        shared_width=shared_width,
    )


def _layers(
    fields: ConfigFields,
    sizes: Sizes,
    kin: Kin,
    attention: tuple[Linear, ...],
    experts: Experts,
    shared: tuple[Linear, ...],
) -> tuple[Layer, ...]:
    """Layers with experts, and those with a plain MLP, which some configs mix in."""
    dense_width = fields.integer("intermediate_size")
    sparse = _sparse_layers(fields, sizes.layers, experts.num_experts)
    norms = 2 * sizes.hidden + qk_norm_parameters(kin.qk_norm, sizes)
    layers = []
    if sparse:
        mlp = experts_mlp(sizes.hidden, experts.width, experts.num_experts) + shared
        layers.append(
            Layer(
                count=sparse,
                linears=attention + mlp,
                norm_parameters=norms,
                num_norms=2,
                intermediate_size=experts.width,
                experts=experts,
            )
        )
    if sparse < sizes.layers:
        layers.append(
            Layer(
                count=sizes.layers - sparse,
                linears=attention + gated_mlp(sizes.hidden, dense_width),
                norm_parameters=norms,
                num_norms=2,
                intermediate_size=dense_width,
            )
        )
    return tuple(layers)


def _sparse_layers(fields: ConfigFields, layers: int, num_experts: int) -> int:
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.indices("mlp_only_layers")
    if not num_experts:
        return 0
    return sum(index not in dense and (index + 1) % step == 0 for index in range(layers))
