# SPDX-License-Identifier: Apache-2.0
"""Values as forms and command lines give them, made ready for validation."""

from __future__ import annotations

from typing import Any


def refuse_bool(value: Any) -> Any:
    """A switch is no number, though Python counts it as one."""
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not true or false")
    return value


def split_names(value: Any) -> Any:
    """Names separated by commas, or a list of them, as a tuple; anything else is left to validation."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return tuple(value) if isinstance(value, list) else value
