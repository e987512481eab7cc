# SPDX-License-Identifier: Apache-2.0
"""What families share: the sizes that all configs have, and the usual shapes of attention and MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed_provider.sizing.architecture import Linear
from deepspeed_provider.sizing.families.fields import HEADS, KEY_VALUE_HEADS, LAYERS, REQUIRED, WIDTH, ConfigFields

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers that every family has; widths in elements."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        return self.key_value_heads * self.head_dim

    def common(self, fields: ConfigFields, *, positions: int) -> dict[str, Any]:
        """The arguments of ``Architecture`` that are named alike in all families."""
        return {
            "model_type": fields.model_type,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "max_positions": fields.integer(*POSITIONS, default=positions),
        }


def read_sizes(
    fields: ConfigFields,
    *,
    key_value_heads: int | None = None,
    head_dim: int | None = None,
    vocab: int = REQUIRED,
    heads: int = REQUIRED,
    grouped: bool = True,
    own_head_dim: bool = True,
) -> Sizes:
    """``key_value_heads`` and ``head_dim`` are the config class's defaults, None where it derives them.

    ``grouped`` is False for models whose code knows no key-value heads of their own number,
    ``own_head_dim`` for those that always divide the hidden size by the heads.
    """
    hidden = fields.integer(*WIDTH)
    num_heads = fields.integer(*HEADS, default=heads)
    key_values = num_heads
    if grouped:
        default = num_heads if key_value_heads is None else key_value_heads
        key_values = fields.integer(*KEY_VALUE_HEADS, default=default, if_null=num_heads)
        fields.refuse_unless_divides(KEY_VALUE_HEADS[0], key_values, HEADS[0], num_heads)
    dim = fields.integer("head_dim", default=head_dim or 0) if own_head_dim else 0
    if not dim:
        fields.refuse_unless_divides(HEADS[0], num_heads, WIDTH[0], hidden)
        dim = hidden // num_heads or 1
    return Sizes(
        vocab=fields.integer("vocab_size", default=vocab),
        hidden=hidden,
        layers=fields.layers(*LAYERS),
        heads=num_heads,
        key_value_heads=key_values,
        head_dim=dim,
    )


def split_attention(
    sizes: Sizes, *, bias: bool = False, out_bias: bool | None = None, out: str = "o_proj"
) -> tuple[Linear, ...]:
    """Query, key, value and output as four matrices; ``out_bias`` where it differs from the others'."""

    def matrix(role: str, out_features: int) -> Linear:
        return Linear(role=role, module=f"{role}_proj", in_features=sizes.hidden, out_features=out_features, bias=bias)

    output = Linear(
        role="o",
        module=out,
        in_features=sizes.query,
        out_features=sizes.hidden,
        bias=bias if out_bias is None else out_bias,
    )
    return matrix("q", sizes.query), matrix("k", sizes.key_value), matrix("v", sizes.key_value), output


def fused_attention(sizes: Sizes, *, module: str, out: str, bias: bool) -> tuple[Linear, ...]:
    """Query, key and value as one matrix."""
    width = sizes.query + 2 * sizes.key_value
    return (
        Linear(role="qkv", module=module, in_features=sizes.hidden, out_features=width, bias=bias),
        Linear(role="o", module=out, in_features=sizes.query, out_features=sizes.hidden, bias=bias),
    )


def gated_mlp(hidden: int, width: int, *, bias: bool = False, shared: bool = False) -> tuple[Linear, ...]:
    """down(act(gate(x)) * up(x)); ``shared`` for the expert that every token passes."""
    prefix = "shared_" if shared else ""

    def into(name: str) -> Linear:
        return Linear(role=prefix + name, module=f"{name}_proj", in_features=hidden, out_features=width, bias=bias)

    down = Linear(role=f"{prefix}down", module="down_proj", in_features=width, out_features=hidden, bias=bias)
    return into("gate"), into("up"), down


def fused_gated_mlp(hidden: int, width: int) -> tuple[Linear, ...]:
    return (
        Linear(role="gate_up", module="gate_up_proj", in_features=hidden, out_features=2 * width),
        Linear(role="down", module="down_proj", in_features=width, out_features=hidden),
    )


def plain_mlp(hidden: int, width: int, *, up: str, down: str, bias: bool) -> tuple[Linear, ...]:
    return (
        Linear(role="up", module=up, in_features=hidden, out_features=width, bias=bias),
        Linear(role="down", module=down, in_features=width, out_features=hidden, bias=bias),
    )


def experts_mlp(hidden: int, width: int, num_experts: int) -> tuple[Linear, ...]:
    """A router and fused three-dimensional expert parameters (transformers 5: none of them an nn.Linear)."""
    return (
        Linear(role="router", module="gate", in_features=hidden, out_features=num_experts, is_module=False),
        Linear(
            role="gate_up",
            module="gate_up_proj",
            in_features=hidden,
            out_features=2 * width,
            copies=num_experts,
            is_module=False,
        ),
        Linear(
            role="down",
            module="down_proj",
            in_features=width,
            out_features=hidden,
            copies=num_experts,
            is_module=False,
        ),
    )


def rotary_dim(fields: ConfigFields, head_dim: int, *, factor: float = 1.0, key: str = "partial_rotary_factor") -> int:
    """How many of a head's elements are rotated; ``factor`` is the config class's default."""
    nested = fields.section("rope_parameters", "rope_scaling").get("partial_rotary_factor")
    if nested is not None:
        share = ConfigFields({"partial_rotary_factor": nested}).number("partial_rotary_factor", default=factor)
    else:
        share = fields.number(key, default=factor)
    return int(head_dim * min(share, 1.0))
