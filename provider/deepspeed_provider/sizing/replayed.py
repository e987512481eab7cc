# SPDX-License-Identifier: Apache-2.0
"""Formulas of parts whose bytes were counted in a replay of the model code, in what the replay found.

A coefficient is what there is for each token (and layer, or word of the vocabulary), in whole bytes; ``rest`` is
what is not proportional: scores of eager attention, a first layer that keeps less, weights that are worked on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.mode import Mode
from deepspeed_provider.sizing.parts import Part

_TAPE: Final = "what autograd keeps of transformers' model code"
Formula = tuple[str, dict[str, float]]


def with_formula(part: Part, architecture: Architecture, how: Mode) -> Part:
    """The part with its formula, where it comes from a replay; as it is, where it does not."""
    explain = _FORMULAS.get(part.name)
    if explain is None:
        return part
    formula, numbers = explain(part.bytes, architecture, how)
    return Part(name=part.name, bytes=part.bytes, formula=formula, numbers=numbers, source=_TAPE)


def _checkpoints(size: int, architecture: Architecture, how: Mode) -> Formula:
    """One residual stream for each layer that has not gone backward yet."""
    sizes = {"tokens": how.tokens, "h": architecture.hidden_size, "w": how.stream_width}
    stream = how.tokens * architecture.hidden_size * how.stream_width
    layers = min(architecture.num_layers, size // stream)
    return _with_rest("L * tokens * h * w", {"L": layers, **sizes}, size - layers * stream)


def _layer_activations(size: int, architecture: Architecture, how: Mode) -> Formula:
    return _proportional(size, {"L": architecture.num_layers, "tokens": how.tokens}, "a")


def _working_layer(size: int, _architecture: Architecture, how: Mode) -> Formula:
    return _proportional(size, {"tokens": how.tokens}, "a")


def _logits_and_loss(size: int, architecture: Architecture, how: Mode) -> Formula:
    if size < how.tokens * architecture.vocab_size:
        return _proportional(size, {"tokens": how.tokens}, "c")
    return _proportional(size, {"tokens": how.tokens, "V": architecture.vocab_size}, "c")


def _attention_mask(size: int, architecture: Architecture, how: Mode) -> Formula:
    """Booleans, or ALiBi's numbers for each head."""
    sizes: dict[str, float] = {"tokens": how.tokens, "s": how.sequence_length}
    if size == how.tokens * how.sequence_length:
        return "tokens * s", sizes
    return "tokens * s * heads * w", {**sizes, "heads": architecture.num_heads, "w": how.stream_width}


def _position_tables(_size: int, architecture: Architecture, how: Mode) -> Formula:
    """Sine and cosine."""
    return "2 * s * d * w", {"s": how.sequence_length, "d": architecture.rotary_dim, "w": how.stream_width}


def _gradient_in_flight(size: int, _architecture: Architecture, how: Mode) -> Formula:
    width = how.compute_width if how.trains_base else how.adapter_width
    return _with_rest("g * elements", {"g": width, "elements": size // width}, size % width)


def _proportional(size: int, sizes: Mapping[str, float], coefficient: str) -> Formula:
    units = 1
    for value in sizes.values():
        units *= int(value)
    each, rest = divmod(size, units)
    return _with_rest(" * ".join([*sizes, coefficient]), {**sizes, coefficient: each}, rest)


def _with_rest(formula: str, numbers: dict[str, float], rest: int) -> Formula:
    return (f"{formula} + rest", {**numbers, "rest": rest}) if rest else (formula, numbers)


_FORMULAS: Final[Mapping[str, Callable[[int, Architecture, Mode], Formula]]] = {
    "checkpoints": _checkpoints,
    "layer_activations": _layer_activations,
    "working_layer": _working_layer,
    "logits_and_loss": _logits_and_loss,
    "attention_mask": _attention_mask,
    "position_tables": _position_tables,
    "gradient_in_flight": _gradient_in_flight,
}
