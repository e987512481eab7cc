# SPDX-License-Identifier: Apache-2.0
"""Whether DeepSpeed takes a value for a key: its type, its bounds, its choices.

Sections that pydantic reads convert what they can ("true", "8", 5e8); all others hand the value on as it is.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from deepspeed_provider.deepspeed_config.schema import Field

_NAMES: Final = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "an object",
    "null": "null",
}
_SWITCHES: Final = ("0", "1", "true", "false", "t", "f", "yes", "no", "y", "n", "on", "off")
_BOUNDS: Final = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """``kind``: wrong-type, loose-type (converted silently), out-of-bounds, not-a-choice, or loose-choice."""

    kind: str
    problem: str
    suggestion: str


def misfit(field: Field, value: Any, *, converts: bool) -> Misfit | None:
    """What is wrong with the value; None for a good one.

    Args:
        converts: the section is read by pydantic.
    """
    if "any" in field.types or (value is None and "null" in field.types):
        return None
    if "choice" in field.types:
        return None if value in field.choices and not isinstance(value, bool) else _choice(field, value)
    fits = max((_fit(kind, value, converts) for kind in field.types), default=_NOT)
    if fits == _NOT:
        return Misfit(kind="wrong-type", problem=f"should be {_wanted(field)}.", suggestion=_default(field))
    outside = _outside(field, value)
    if outside is not None:
        return outside
    if fits == _CONVERTED:
        text = f"is converted silently; it should be {_wanted(field)}."
        return Misfit(kind="loose-type", problem=text, suggestion=_default(field))
    return None


_NOT, _CONVERTED, _FITS = 0, 1, 2


def _fit(kind: str, value: Any, converts: bool) -> int:
    if kind == "bool":
        return _fit_bool(value, converts)
    if kind in ("int", "float"):
        return _fit_number(kind, value, converts)
    wanted: dict[str, type | tuple[type, ...]] = {"str": str, "list": (list, tuple), "dict": Mapping}
    return _FITS if kind in wanted and isinstance(value, wanted[kind]) else _NOT


def _fit_bool(value: Any, converts: bool) -> int:
    if isinstance(value, bool):
        return _FITS
    if isinstance(value, int | float):
        return _CONVERTED if value in (0, 1) else _NOT
    text = str(value).strip().lower() if isinstance(value, str) else ""
    return _CONVERTED if converts and text in _SWITCHES else _NOT


def _fit_number(kind: str, value: Any, converts: bool) -> int:
    if isinstance(value, bool):
        return _CONVERTED if converts else _NOT
    if isinstance(value, int) or (kind == "float" and isinstance(value, float)):
        return _FITS
    if isinstance(value, float):
        return _FITS if converts and value.is_integer() else _NOT  # 5e8 is a usual way to write a size
    if not converts or not isinstance(value, str):
        return _NOT
    number = _number(value)
    return _CONVERTED if number is not None and (kind == "float" or number.is_integer()) else _NOT


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _outside(field: Field, value: Any) -> Misfit | None:
    number = _number(value)
    if number is None or not field.bounds:
        return None
    holds = {
        "ge": lambda bound: number >= bound,
        "gt": lambda bound: number > bound,
        "le": lambda bound: number <= bound,
        "lt": lambda bound: number < bound,
    }
    if all(holds[name](bound) for name, bound in field.bounds.items()):
        return None
    text = " and ".join(f"{_BOUNDS[name]} {bound:g}" for name, bound in field.bounds.items())
    return Misfit(kind="out-of-bounds", problem=f"should be {text}.", suggestion=_default(field))


def _choice(field: Field, value: Any) -> Misfit:
    if any(not isinstance(choice, str) and _number(value) == choice for choice in field.choices):
        text = f"should be the number {_nearest(field.choices, value)}."
        return Misfit(kind="loose-choice", problem=text, suggestion="DeepSpeed converts it, other readers do not.")
    choices = ", ".join(repr(choice) for choice in field.choices)
    return Misfit(
        kind="not-a-choice",
        problem=f"is not one of {choices}.",
        suggestion=f"Did you mean {_nearest(field.choices, value)!r}?",
    )


def _nearest(choices: tuple[Any, ...], value: Any) -> Any:
    number = _number(value)
    if number is not None and all(isinstance(choice, int) for choice in choices):
        return min(choices, key=lambda choice: abs(choice - number))
    near = difflib.get_close_matches(str(value).lower(), [str(choice) for choice in choices], n=1, cutoff=0)
    return next((choice for choice in choices if str(choice) in near), choices[0])


def _wanted(field: Field) -> str:
    return " or ".join(_NAMES[kind] for kind in field.types if kind in _NAMES)


def _default(field: Field) -> str:
    return f"DeepSpeed's default is {json.dumps(field.default)}."
