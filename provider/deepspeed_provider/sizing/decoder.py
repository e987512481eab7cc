# SPDX-License-Identifier: Apache-2.0
"""One decoder layer as a tape program.

It follows the model code of transformers 5.24 and PEFT 0.21, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable

from deepspeed_provider.sizing.architecture import Architecture, Experts, Layer, Linear, NormKind, QkNorm, Residual
from deepspeed_provider.sizing.linears import Linears
from deepspeed_provider.sizing.mode import FP32, Mode
from deepspeed_provider.sizing.tape import Tape, Value


def layer_tape(architecture: Architecture, layer: Layer, mode: Mode, *, needs_grad: bool = True) -> Tape:
    """The program of one layer, from the residual stream to the residual stream.

    ``needs_grad`` is of its input: not so behind a frozen embedding.
    """
    return _LayerProgram(architecture, layer, mode).write(needs_grad)


class _LayerProgram:
    def __init__(self, architecture: Architecture, layer: Layer, mode: Mode) -> None:
        self.a, self.layer, self.mode, self.tape = architecture, layer, mode, Tape()
        self.tokens, self.ranks = mode.tokens, dict(mode.adapter_ranks)
        self.linears = Linears(self.tape, mode)

    def write(self, needs_grad: bool) -> Tape:
        x = self.tape.input(self.tokens * self.a.hidden_size, self.mode.stream_width, needs_grad=needs_grad)
        if self.a.residual is Residual.PARALLEL:
            self._parallel(x)
        else:
            x, attention = self._branch(x, self._attention)
            self._branch(x, self._mlp)
            if self.a.holds_attention_output:
                self.tape.keep_until_here(attention)
        return self.tape

    def _branch(self, x: Value, body: Callable[[Value], Value]) -> tuple[Value, Value]:
        """(the stream after it, what was added to the stream)."""
        before = self.a.residual in (Residual.PRE, Residual.SANDWICH)
        after = self.a.residual in (Residual.POST, Residual.SANDWICH)
        inner = body(self._norm(x) if before else x)
        inner = self._norm(inner) if after else self._dropout(inner, self.a.hidden_dropout)
        return self.tape.add(x, inner), inner

    def _parallel(self, x: Value) -> None:
        first = self._norm(x)
        second = self._norm(x) if self.layer.num_norms > 1 else first
        attention = self._dropout(self._attention(first), self.a.hidden_dropout)
        mlp = self._dropout(self._mlp(second), self.a.hidden_dropout)
        self.tape.add(self.tape.add(mlp, attention), x)

    def _norm(self, x: Value) -> Value:
        return norm(self.tape, x, self.a.norm, trained=self.mode.trains_base, width=self.a.hidden_size)

    def _dropout(self, x: Value, probability: float) -> Value:
        if not probability:
            return x
        return self.tape.op((x,), x.elements, x.width, extra_saved=x.elements)

    # attention

    def _attention(self, x: Value) -> Value:
        query, key, value = self._projections(x)
        query, key = self._qk_norm(query), self._qk_norm(key)
        query, key = self._rotary(query), self._rotary(key)
        mode = self.mode
        alone = self.a.broadcasts_key and mode.attention != "eager"
        if mode.attention != "flash" and self.a.num_key_value_heads < self.a.num_heads and not alone:
            key, value = self._expand(key), self._expand(value)
        if mode.attention == "eager":
            out = self._eager(query, key, value)
        elif mode.attention == "sdpa" and self.a.broadcasts_key:
            out = self._math(query, key, value)
        else:
            out = self._fused(query, key, value)
        if mode.attention == "sdpa" and self.a.concatenates_query:
            # Put together from turned and unturned halves, the query lies head by head; so does then
            # the output, and the output projection needs it token by token.
            out = self.tape.op((out,), out.elements, out.width)
        out = self._linear(out, "o")
        self.tape.keep_until_here(x, query, key, value)
        return out

    def _projections(self, x: Value) -> tuple[Value, Value, Value]:
        q, kv = self.tokens * self.a.query_width, self.tokens * self.a.key_value_width
        if self.layer.linear("qkv") is None:
            return self._linear(x, "q"), self._linear(x, "k"), self._linear(x, "v")
        fused = self._linear(x, "qkv")
        return self._part(fused, q), self._part(fused, kv), self._part(fused, kv)

    def _part(self, source: Value, elements: int) -> Value:
        """A slice: shares storage forward; its gradient is put into one as large as the source."""
        part = self.tape.view(source, elements)
        self.tape.nodes[-1].passes_gradient = False
        return part

    def _qk_norm(self, x: Value) -> Value:
        if self.a.qk_norm is QkNorm.NONE:
            return x
        width = self.a.head_dim if self.a.qk_norm is QkNorm.HEAD else x.elements // self.tokens
        return norm(self.tape, x, self.a.norm, trained=self.mode.trains_base, width=width)

    def _rotary(self, x: Value) -> Value:
        """x * cos + rotate_half(x) * sin: keeps only the shared tables."""
        if not self.a.rotary_dim:
            return x
        return self.tape.op((x,), x.elements, x.width, forward_temp=2 * x.bytes, backward_temp=2 * x.bytes)

    def _expand(self, x: Value) -> Value:
        """Key or value heads repeated to as many as there are query heads; one head alone is only looked at again."""
        if self.a.num_key_value_heads == 1:
            return self._part(x, self.tokens * self.a.query_width)
        return self.tape.op((x,), self.tokens * self.a.query_width, x.width)

    def _fused(self, query: Value, key: Value, value: Value) -> Value:
        """Flash or memory-efficient kernel: keeps inputs, output, log-sum-exp, and SDPA also its mask."""
        mode = self.mode
        # Without ALiBi the mask is made of booleans, anew in each layer.
        own_mask = mode.attention == "sdpa" and not self.a.alibi
        mask = mode.tokens * mode.sequence_length * query.width if own_mask else 0
        statistics = mode.tokens * self.a.num_heads * FP32
        return self.tape.op(
            (query, key, value),
            mode.tokens * self.a.query_width,
            query.width,
            saved=(query, key, value),
            saves_output=True,
            extra_saved=mask + statistics,
        )

    def _math(self, query: Value, key: Value, value: Value) -> Value:
        """SDPA without a fused kernel: everything in fp32."""
        tape, scores = self.tape, self.tokens * self.mode.sequence_length * self.a.num_heads
        wide_query, wide_key = (tape.op((tape.cast(x, FP32),), x.elements, FP32) for x in (query, key))
        wide_value = tape.cast(value, FP32)
        wide_key = self._in_each_head(wide_key)
        weights = tape.op((wide_query, wide_key), scores, FP32, saved=(wide_query, wide_key))
        weights = tape.add(weights, Value(0, FP32, False))  # mask
        weights = tape.op((weights,), scores, FP32, saves_output=True)
        wide_value = self._in_each_head(wide_value)
        out = tape.op((weights, wide_value), query.elements, FP32, saved=(weights, wide_value))
        return tape.cast(out, query.width)

    def _in_each_head(self, x: Value) -> Value:
        """One head for all is a view as long as there is but one sequence; else each product has its copy."""
        if self.mode.micro_batch_size == 1:
            return x
        return self.tape.op((x,), self.tokens * self.a.query_width, x.width)

    def _eager(self, query: Value, key: Value, value: Value) -> Value:
        tape, scores = self.tape, self.tokens * self.mode.sequence_length * self.a.num_heads
        weights = tape.op((query, key), scores, query.width, saved=(query, key))
        weights = tape.op((weights,), scores, query.width)  # scaling
        if self.a.attention_softcap:
            weights = tape.op((weights,), scores, query.width)
            weights = tape.op((weights,), scores, query.width, saves_output=True)
            weights = tape.op((weights,), scores, query.width)
        weights = tape.add(weights, Value(0, query.width, False))  # mask
        # CUDA's softmax backward first multiplies gradient and output, in fp32 (aten SoftMax.cu).
        weights = tape.op((weights,), scores, FP32, saves_output=True, backward_temp=scores * FP32)
        weights = tape.cast(weights, query.width)
        weights = self._dropout(weights, self.a.attention_dropout)
        return tape.op((weights, value), self.tokens * self.a.query_width, query.width, saved=(weights, value))

    # MLP

    def _mlp(self, x: Value) -> Value:
        out = self._feed_forward(x)
        self.tape.keep_until_here(x)
        return out

    def _feed_forward(self, x: Value) -> Value:
        return self._dense(x) if self.layer.experts is None else self._experts(x, self.layer.experts)

    def _dense(self, x: Value) -> Value:
        if not self.a.gated_mlp:
            return self._linear(self._activation(self._linear(x, "up")), "down")
        if self.layer.linear("gate_up") is not None:
            gate, up = self._halves(self._linear(x, "gate_up"))
            gate = self._activation(gate)
        else:
            gate = self._activation(self._linear(x, "gate"))
            up = self._linear(x, "up")
        return self._linear(self.tape.product(gate, up), "down")

    def _halves(self, fused: Value) -> tuple[Value, Value]:
        return self._part(fused, fused.elements // 2), self._part(fused, fused.elements // 2)

    def _experts(self, x: Value, experts: Experts) -> Value:
        """Each token's row is copied once for each of its experts; experts run as grouped products."""
        tape, rows = self.tape, self.tokens * experts.experts_per_token
        shared = self._shared_product(x) if experts.shared_width else None
        logits = self._linear(x, "router")
        scores = tape.op((logits,), logits.elements, FP32, saves_output=True)
        router_width = FP32 if self.a.routes_in_fp32 else x.width
        picked = tape.op((scores,), rows, router_width, extra_saved=rows * 8)
        selected = tape.op((x,), rows * self.a.hidden_size, x.width, extra_saved=2 * rows * 8)
        gate, up = self._halves(self._grouped(selected, "gate_up"))
        out = self._grouped(tape.product(self._activation(gate), up), "down")
        weighted = tape.product(out, picked, max(out.width, router_width))
        order = tape.op((), rows, 8)
        ordered = tape.op((weighted, order), weighted.elements, weighted.width, saved=(order,))
        tape.keep_until_here(selected, weighted)
        total = tape.op((ordered,), x.elements, ordered.width)
        tape.keep_until_here(selected)
        total = tape.cast(total, x.width)
        return total if shared is None else tape.add(total, self._gated_share(x, shared))

    def _grouped(self, x: Value, role: str) -> Value:
        """All experts' matrices in one product. An adapter is first added to a copy of all of them (PEFT)."""
        mode, linear = self.mode, self.layer.linear(role)
        assert linear is not None, role
        rows = x.elements // linear.in_features
        rank = self.ranks.get(linear, 0)
        if rank:
            merged = self._merged(linear, rank)
            return self.tape.op((x, merged), rows * linear.out_features, x.width, saved=(x, merged))
        return self.tape.op(
            (x,),
            rows * linear.out_features,
            x.width,
            saved=(x,) if mode.trains_base else (),
            weight_gradient=linear.weights * mode.compute_width if mode.trains_base else 0,
            reads_weight=True,
        )

    def _merged(self, linear: Linear, rank: int) -> Value:
        factors = linear.copies * rank * (linear.in_features + linear.out_features)
        return self.tape.op(
            (),
            linear.weights,
            self.mode.compute_width,
            extra_saved=factors * self.mode.compute_width,
            weight_gradient=factors * self.mode.adapter_width,
        )

    def _shared_product(self, x: Value) -> Value:
        product = self.tape.product(self._activation(self._linear(x, "shared_gate")), self._linear(x, "shared_up"))
        return self._linear(product, "shared_down")

    def _gated_share(self, x: Value, out: Value) -> Value:
        if self.layer.linear("shared_expert_gate") is None:
            return out
        gate = self._linear(x, "shared_expert_gate")
        gate = self.tape.op((gate,), gate.elements, gate.width, saves_output=True)
        return self.tape.product(out, gate)

    def _activation(self, x: Value) -> Value:
        tape, n, w = self.tape, x.elements, x.width
        if self.a.activation in ("gelu_new", "gelu_fast"):
            # 0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3))), each its own operation
            cube = tape.op((x,), n, w, saved=(x,))
            inner = tape.op((tape.add(x, tape.op((cube,), n, w)),), n, w)
            one_plus = tape.op((tape.op((inner,), n, w, saves_output=True),), n, w, passes_gradient=True)
            return tape.product(tape.op((x,), n, w), one_plus)
        if self.a.activation == "relu":
            return tape.op((x,), n, w, saves_output=True)
        return tape.op((x,), n, w, saved=(x,))

    # linear layers

    def _linear(self, x: Value, role: str) -> Value:
        linear = self.layer.linear(role)
        assert linear is not None, role
        if role == "router":
            return self.linears.plain(x, linear)
        out = self.linears.apply(x, linear)
        self.tape.keep_until_here(x)
        return out


def norm(tape: Tape, x: Value, kind: NormKind, *, trained: bool, width: int) -> Value:
    """Root-mean-square norms compute in fp32 from a copy, which is kept; LayerNorm keeps its input."""
    rows = x.elements // width
    weight_temp = x.bytes if trained else 0
    if kind is NormKind.LAYER:
        return tape.op((x,), x.elements, x.width, saved=(x,), extra_saved=2 * rows * FP32)
    wide = tape.cast(x, FP32)
    # Its gradient is grad * (2 * x ** 1), each its own tensor.
    square = tape.op((wide,), x.elements, FP32, saved=(wide,), backward_temp=2 * x.elements * FP32)
    root = tape.op((square,), rows, FP32, saves_output=True)
    scaled = tape.op((wide, root), x.elements, FP32, saved=(wide, root), backward_temp=x.elements * FP32)
    if kind is NormKind.RMS_UNIT_OFFSET:
        out = tape.op((scaled,), x.elements, FP32, saved=(scaled,) if trained else (), backward_temp=2 * weight_temp)
        return tape.cast(out, x.width)
    narrow = tape.cast(scaled, x.width)
    return tape.op((narrow,), x.elements, x.width, saved=(narrow,) if trained else (), backward_temp=weight_temp)
