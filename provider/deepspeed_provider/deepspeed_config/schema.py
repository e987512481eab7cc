# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed reads of a configuration: keys, types, bounds, defaults, by section.

``data/schema.json`` was recorded from DeepSpeed's own classes (its version and date are in it), since this core
must run where DeepSpeed is not installed. A test extracts it again and compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key.

    Attributes:
        section: path of the section that it holds; None for a value.
        types: of ``bool``, ``int``, ``float``, ``str``, ``list``, ``dict``, ``choice``, ``null``; ``any`` where
            DeepSpeed's code does not tell.
        default: what DeepSpeed takes where the key is absent.
        choices: the only values.
        bounds: ``ge``, ``gt``, ``le``, ``lt`` to number.
        also: a second name under which DeepSpeed reads it.
        deprecated: the key that replaces it; None where it is not deprecated.
        stages: ZeRO stages at which the engine reads it; None where that does not depend on the stage.
    """

    section: str | None
    types: tuple[str, ...]
    default: Any
    choices: tuple[Any, ...]
    bounds: Mapping[str, float]
    also: str | None
    deprecated: str | None
    stages: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Keys that belong together.

    Attributes:
        closed: DeepSpeed refuses unknown keys; elsewhere it ignores them.
        open: other parts of DeepSpeed read more keys than are listed.
        fields: by name, second names included.
    """

    closed: bool
    open: bool
    fields: Mapping[str, Field]

    def canonical(self, key: str) -> str:
        """The first name of a key that has two."""
        field = self.fields.get(key)
        if field is None or field.also != key:
            return key
        return next(name for name, other in self.fields.items() if other is field and name != key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Parameters that its constructor takes, by device: ``gpu``, ``cpu`` (offloaded states), ``torch``."""

    tested: bool
    parameters: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """All of it.

    Attributes:
        version: of DeepSpeed.
        extracted_on: date.
        removed: by dotted path, why DeepSpeed now refuses a key that it once took.
        sections: by dotted path; the top level is "".
        optimizers: DeepSpeed's own in lower case, torch's as they are written.
        schedulers: parameters of the constructor, and whether each is required.
        trainer_fills: dotted paths at which the Hugging Face trainer replaces "auto".
    """

    version: str
    extracted_on: str
    removed: Mapping[str, str]
    sections: Mapping[str, Section]
    optimizers: Mapping[str, Optimizer]
    schedulers: Mapping[str, Mapping[str, bool]]
    trainer_fills: frozenset[str]

    def field(self, path: str) -> Field:
        """Raises KeyError for a path that DeepSpeed does not know."""
        section, _, name = path.rpartition(".")
        return self.sections[section].fields[name]


@cache
def schema() -> Schema:
    """The packaged one."""
    text = resources.files("deepspeed_provider.deepspeed_config").joinpath("data/schema.json").read_text("utf-8")
    content = json.loads(text)
    return Schema(
        version=content["deepspeed"],
        extracted_on=content["extracted_on"],
        removed=content["removed"],
        sections={path: _section(row) for path, row in content["sections"].items()},
        optimizers={
            name: Optimizer(
                tested=row["tested"], parameters={device: tuple(names) for device, names in row["parameters"].items()}
            )
            for name, row in content["optimizers"].items()
        },
        schedulers=content["schedulers"],
        trainer_fills=frozenset(content["trainer_fills"]),
    )


def _section(row: Mapping[str, Any]) -> Section:
    fields = {name: _field(item) for name, item in row["fields"].items()}
    fields |= {field.also: field for field in list(fields.values()) if field.also}
    return Section(closed=row["closed"], open=row["open"], fields=fields)


def _field(row: Mapping[str, Any]) -> Field:
    types = tuple(row.get("types", ())) + (("null",) if row.get("null") else ())
    return Field(
        section=row.get("section"),
        types=types,
        default=row.get("default"),
        choices=tuple(row.get("choices", ())),
        bounds={name: row[name] for name in ("ge", "gt", "le", "lt") if name in row},
        also=row.get("also"),
        deprecated=row.get("deprecated"),
        stages=tuple(row["stages"]) if "stages" in row else None,
    )
