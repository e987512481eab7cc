# SPDX-License-Identifier: Apache-2.0
"""A named part of memory, with the formula that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Part:
    """``formula`` is an expression (+ - * / ceil min max) in the symbols of ``numbers`` whose value is ``bytes``, up
    to one byte for each division; ``source`` says where it comes from."""

    name: str
    bytes: int
    formula: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def explained(self) -> str:
        """The formula, and the numbers that were put into it."""
        numbers = ", ".join(f"{symbol} = {_written(value)}" for symbol, value in self.numbers.items())
        return f"{self.formula} [{numbers}]" if numbers else self.formula


def present(parts: list[Part]) -> tuple[Part, ...]:
    """Those that take any memory."""
    return tuple(part for part in parts if part.bytes)


def _written(value: float) -> str:
    """All digits: who computes the formula finds the bytes."""
    return f"{int(value):,}" if value == int(value) else repr(value)
