# SPDX-License-Identifier: Apache-2.0
"""What a decoder-only language model is made of, in numbers: all that memory depends on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class NormKind(StrEnum):
    """How a normalisation is written in the model's code, which decides what autograd keeps of it."""

    RMS = "rms"  # fp32 inside, weight times the result cast back
    RMS_UNIT_OFFSET = "rms_unit_offset"  # fp32 throughout, times (1 + weight)
    LAYER = "layer"  # one fused operation


class Residual(StrEnum):
    """Where a layer's norms stand and how attention and MLP are added to the stream."""

    PRE = "pre"  # x + attn(norm(x)), then x + mlp(norm(x))
    POST = "post"  # x + norm(attn(x)), then x + norm(mlp(x))
    SANDWICH = "sandwich"  # x + norm(attn(norm(x))), then x + norm(mlp(norm(x)))
    PARALLEL = "parallel"  # x + attn(norm(x)) + mlp(norm(x)), with one norm or two


class QkNorm(StrEnum):
    """What the norm of queries and keys spans."""

    NONE = "none"
    HEAD = "head"  # each head's head_dim, one weight for all heads
    WIDTH = "width"  # the whole width of all heads


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One matrix of a layer, of ``in_features`` x ``out_features``, ``copies`` times (experts)."""

    role: str  # q k v o qkv gate up gate_up down router shared_gate shared_up shared_down shared_expert_gate
    module: str  # its name in the model's code, by which LoRA finds it
    in_features: int
    out_features: int
    bias: bool = False
    copies: int = 1
    is_module: bool = True  # an nn.Linear (or GPT-2's Conv1D); False: a bare parameter, never quantised

    @property
    def weights(self) -> int:
        return self.copies * self.in_features * self.out_features

    @property
    def parameters(self) -> int:
        return self.weights + (self.copies * self.out_features if self.bias else 0)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of a layer's MLP."""

    num_experts: int
    experts_per_token: int
    width: int
    shared_width: int = 0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """``count`` equal layers."""

    count: int
    linears: tuple[Linear, ...]
    norm_parameters: int  # of all norms of one layer, query and key norms included
    num_norms: int  # norms of hidden width (without the query and key norms)
    intermediate_size: int
    experts: Experts | None = None
    other_parameters: int = 0

    @cached_property
    def parameters(self) -> int:
        """Of one layer."""
        return sum(linear.parameters for linear in self.linears) + self.norm_parameters + self.other_parameters

    def linear(self, role: str) -> Linear | None:
        return next((linear for linear in self.linears if linear.role == role), None)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder-only language model, from its config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    norm: NormKind
    residual: Residual
    activation: str  # the config's name: silu, gelu, gelu_new, gelu_pytorch_tanh, relu, ...
    gated_mlp: bool
    qk_norm: QkNorm = QkNorm.NONE
    rotary_dim: int = 0  # 0: no rotary positions (learned, or ALiBi)
    position_rows: int = 0  # rows of learned position embeddings
    embedding_width: int = 0  # 0: hidden_size
    embedding_norm_parameters: int = 0
    embedding_projection_parameters: int = 0
    final_norm_parameters: int = 0
    tied_embeddings: bool = False
    head_bias: bool = False
    head_module: str = "lm_head"
    logit_softcap: bool = False
    attention_softcap: bool = False
    embedding_scale: bool = False
    alibi: bool = False
    fused_attention: bool = True  # False: the model's code has eager attention only
    rotary_concatenates: bool = False  # even where all of a head is turned
    broadcasts_key: bool = False  # one key head meets all query heads unexpanded, which fused kernels refuse
    holds_attention_output: bool = False  # the layer's code refers to it until the MLP is over
    routes_in_fp32: bool = False  # the router's weights stay fp32 when they scale the experts' output
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    embedding_dropout: float = 0.0
    max_positions: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def concatenates_query(self) -> bool:
        """Whether queries are put together from parts, which leaves them lying head by head."""
        return self.rotary_concatenates or 0 < self.rotary_dim < self.head_dim

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def token_embedding_parameters(self) -> int:
        return self.vocab_size * (self.embedding_width or self.hidden_size)

    @property
    def head_parameters(self) -> int:
        """Of the output head, as far as it is not shared with the embedding."""
        own = 0 if self.tied_embeddings else self.token_embedding_parameters
        return own + (self.vocab_size if self.head_bias else 0)

    @property
    def embedding_parameters(self) -> int:
        """Token and position embeddings, their norm and projections; without the head."""
        positions = self.position_rows * self.hidden_size
        return (
            self.token_embedding_parameters
            + positions
            + self.embedding_norm_parameters
            + self.embedding_projection_parameters
        )

    @cached_property
    def layer_parameters(self) -> int:
        """Of all layers."""
        return sum(layer.count * layer.parameters for layer in self.layers)

    @cached_property
    def parameters(self) -> int:
        """All, shared ones once."""
        return self.embedding_parameters + self.layer_parameters + self.final_norm_parameters + self.head_parameters

    @cached_property
    def expert_parameters(self) -> int:
        """Of all routed experts (without router and shared expert)."""
        return sum(
            layer.count * linear.parameters for layer in self.layers for linear in layer.linears if linear.copies > 1
        )

    @cached_property
    def active_parameters(self) -> int:
        """That one token passes through: all, but of the experts only those chosen."""
        idle = 0
        for layer in self.layers:
            if layer.experts is not None:
                share = layer.experts.experts_per_token / layer.experts.num_experts
                routed = sum(linear.parameters for linear in layer.linears if linear.copies > 1)
                idle += round(layer.count * routed * (1 - share))
        return self.parameters - idle
