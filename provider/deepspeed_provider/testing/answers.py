# SPDX-License-Identifier: Apache-2.0
"""What the fake workspace says when it refuses, and how it reads what it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Refused(Exception):
    """An answer that is no success: ``{"error_code", "message"}`` with a status."""

    def __init__(self, status: int, error_code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error_code": error_code, "message": message}


def invalid(message: str) -> Refused:
    return Refused(400, "INVALID_PARAMETER_VALUE", message)


def missing(message: str) -> Refused:
    return Refused(404, "RESOURCE_DOES_NOT_EXIST", message)


def text(arguments: Mapping[str, Any], name: str) -> str:
    """An argument that there must be."""
    value = arguments.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(f"{name} = {value!r}: should be a string that is not empty")
    return value


def flag(arguments: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """A boolean, which a query has as text."""
    return str(arguments.get(name, default)).lower() == "true"


def whole(arguments: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """An integer; in quotes too, since the Databricks provider's operator sends numbers so."""
    value = arguments.get(name)
    if value in (None, "") and default is not None:
        return default
    try:
        return int(str(value))
    except ValueError:
        raise invalid(f"{name} = {value!r}: should be an integer") from None


def page_of(found: list[Any], arguments: Mapping[str, Any], size: int) -> tuple[list[Any], dict[str, str]]:
    """The page that ``page_token`` asks for, and the tokens of its neighbours."""
    token = str(arguments.get("page_token") or "from-0")
    number = token.removeprefix("from-")
    if not token.startswith("from-") or not number.isdecimal():
        raise invalid(f"page_token = {token!r} is none that was given out.")
    offset = int(number)
    tokens = {}
    if offset + size < len(found):
        tokens["next_page_token"] = f"from-{offset + size}"
    if offset:
        tokens["prev_page_token"] = f"from-{max(0, offset - size)}"
    return found[offset : offset + size], tokens
