# SPDX-License-Identifier: Apache-2.0
"""Configs of widely used models, bundled, so that a name is enough: no network, no weights."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from deepspeed_provider.errors import FieldProblem, SpecError


def model_names() -> tuple[str, ...]:
    """The hub ids of all bundled models."""
    return tuple(_models())


def model_config(name: str) -> dict[str, Any]:
    """The config.json of a bundled model, reduced to what its size depends on; a copy of the caller's own.

    ``name`` is a hub id, in any case, or its part after the slash where that means one config only.
    Raises :class:`SpecError` with the nearest names for any other.
    """
    found = _by_short_name().get(name.strip().lower())
    if found is None:
        raise SpecError([_unknown(name)])
    return dict(json.loads(json.dumps(_models()[found]["config"])))


@cache
def _models() -> Mapping[str, Mapping[str, Any]]:
    """Hub id -> {"config", "source", and where known the published count "parameters"}."""
    text = resources.files("deepspeed_provider.sizing").joinpath("data/models.json").read_text(encoding="utf-8")
    rows = json.loads(text)["models"]
    return MappingProxyType({name: rows[row["same_as"]] if "same_as" in row else row for name, row in rows.items()})


@cache
def _by_short_name() -> Mapping[str, str]:
    """Lower-cased hub ids, and their last parts where all models so called are alike -> hub id."""
    rows = _models()
    short: dict[str, list[str]] = {}
    for name in rows:
        short.setdefault(name.rpartition("/")[2].lower(), []).append(name)
    alike = {key: names[0] for key, names in short.items() if all(rows[name] is rows[names[0]] for name in names)}
    return MappingProxyType(alike | {name.lower(): name for name in rows})


def _unknown(name: str) -> FieldProblem:
    known = _by_short_name()
    near = difflib.get_close_matches(name.strip().lower(), list(known), n=5, cutoff=0.5)
    names = list(dict.fromkeys(known[match] for match in near))
    hint = f"Nearest are {', '.join(names)}; or give" if names else "Give"
    return FieldProblem(
        field="model",
        value=name,
        problem="is not in the bundled catalogue",
        suggestion=f"{hint} the path of a config.json, the config itself, or a parameter count.",
    )
