# SPDX-License-Identifier: Apache-2.0
"""Arguments of operators as templates leave them: an empty Param is a text, and so are objects and switches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_provider.errors import SpecError
from deepspeed_provider.handed_plan import read_object
from deepspeed_provider.operators.plan import is_blank


def text(value: str | None) -> str | None:
    """None where nothing is given."""
    return None if is_blank(value) else value


def job(value: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    """The argument ``job``, also as JSON. Raises :class:`SpecError`."""
    return None if is_blank(value) else read_object(value, "job", "Give {'existing_cluster_id': …}.")


def switch(name: str, value: bool | str | None) -> bool:
    """True or false, also as a word; nothing is false. Raises :class:`SpecError`."""
    if is_blank(value):
        return False
    word = str(value).strip().lower()
    if word not in ("true", "false"):
        raise SpecError.of(name, value, "should be true or false", "Leave it out for false.")
    return word == "true"
