# SPDX-License-Identifier: Apache-2.0
"""One matrix product as a tape program: trained, frozen, in four bits, with an adapter beside it."""

from __future__ import annotations

from deepspeed_provider.sizing.architecture import Linear
from deepspeed_provider.sizing.mode import Mode
from deepspeed_provider.sizing.tape import Tape, Value


class Linears:
    """Matrices that are applied to each token on one tape."""

    def __init__(self, tape: Tape, mode: Mode) -> None:
        self._tape, self._mode = tape, mode
        self._tokens, self._ranks = mode.tokens, dict(mode.adapter_ranks)

    def apply(self, x: Value, linear: Linear) -> Value:
        """The matrix as the options have it."""
        base = self._quantised(x, linear) if self._mode.quantised and linear.is_module else self.plain(x, linear)
        rank = self._ranks.get(linear, 0)
        return self._with_adapter(x, base, linear, rank) if rank else base

    def plain(self, x: Value, linear: Linear) -> Value:
        mode = self._mode
        trained = mode.trains_base
        return self._tape.op(
            (x,),
            self._tokens * linear.out_features,
            x.width,
            saved=(x,) if trained else (),
            weight_gradient=linear.in_features * linear.out_features * mode.compute_width if trained else 0,
            reads_weight=True,
        )

    def _quantised(self, x: Value, linear: Linear) -> Value:
        """The weight is dequantised for the product, forward and back; the packed weight is what is kept."""
        mode, tape = self._mode, self._tape
        weight = linear.in_features * linear.out_features * mode.compute_width
        narrow = tape.cast(x, mode.compute_width)
        out = tape.op(
            (narrow,),
            self._tokens * linear.out_features,
            mode.compute_width,
            forward_temp=weight,
            backward_temp=weight,
        )
        if linear.bias:
            out = tape.op((out,), out.elements, out.width, passes_gradient=True)
        return tape.cast(out, x.width)

    def _with_adapter(self, x: Value, base: Value, linear: Linear, rank: int) -> Value:
        """base + B(A(x)) * scaling, the adapter in its own precision (PEFT casts its input)."""
        tape, width = self._tape, self._mode.adapter_width
        x = tape.cast(x, width)
        if self._mode.adapter_dropout:
            x = tape.op((x,), x.elements, x.width, extra_saved=x.elements)
        low = tape.op((x,), self._tokens * rank, width, saved=(x,), weight_gradient=linear.in_features * rank * width)
        high = tape.op(
            (low,),
            self._tokens * linear.out_features,
            width,
            saved=(low,),
            weight_gradient=linear.out_features * rank * width,
        )
        scaled = tape.op((high,), high.elements, width)
        return tape.cast(tape.add(base, scaled), base.width)
