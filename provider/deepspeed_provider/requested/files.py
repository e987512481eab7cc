# SPDX-License-Identifier: Apache-2.0
"""Files that a request for a plan names: rows of a catalogue, a workspace's saved answer."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from deepspeed_provider.errors import SpecError

# A workspace's whole answer has some hundred kilobytes.
LARGEST_FILE_BYTES: Final = 16 * 2**20


def read_answer(file: object, field: str) -> Mapping[str, Any]:
    """A saved answer of list-node-types, or its path; a plain list of node types is one too."""
    content = _parsed(_read(file, field), file, field) if isinstance(file, str) else file
    # What was handed over is not shown: an answer has hundreds of node types.
    file = file if isinstance(file, str) else "(its content)"
    if isinstance(content, list):
        content = {"node_types": content}
    works = "Save one with `databricks clusters list-node-types --output json`."
    if not isinstance(content, dict) or not isinstance(content.get("node_types"), list):
        raise SpecError.of(field, file, "is no answer of list-node-types, which has a list called node_types", works)
    for number, entry in enumerate(content["node_types"], start=1):
        if not _is_node_type(entry):
            raise SpecError.of(
                field, file, f"number {number} of its node_types is not as list-node-types has it", works
            )
    return content


def _is_node_type(entry: Any) -> bool:
    """As far as it is read."""
    if not isinstance(entry, dict) or not isinstance(entry.get("node_type_id"), str):
        return False
    info = entry.get("node_info")
    return (
        isinstance(entry.get("num_gpus"), int | None)
        and isinstance(info, dict | None)
        and isinstance((info or {}).get("status"), list | None)
    )


def rows_of(file: object) -> list[dict[str, Any]]:
    """Of a CSV table with a header, of a JSON list of objects, or such a list."""
    if not isinstance(file, str):
        return _objects(file, file)
    text = _read(file, "catalog")
    if text.lstrip().startswith(("[", "{")):
        return _objects(_parsed(text, file, "catalog"), file)
    table = csv.DictReader(text.splitlines(), strict=True)
    try:
        rows: list[dict[str, Any]] = list(table)
        if not {"cloud", "node_type_id"} <= set(table.fieldnames or ()):
            raise csv.Error("it has no columns cloud and node_type_id")
    except csv.Error as error:
        raise SpecError.of("catalog", file, f"is no CSV table ({error})", "Begin it with a line of columns.") from None
    for number, row in enumerate(rows, start=1):
        if None in row:
            names = len(table.fieldnames or ())
            raise SpecError.of(
                "catalog", file, f"row {number} has more cells than the {names} columns", "Quote commas."
            )
    return rows


def _objects(content: object, file: object) -> list[dict[str, Any]]:
    if not isinstance(content, list | tuple) or not all(isinstance(row, dict) for row in content):
        raise SpecError.of("catalog", file, "is no list of objects", 'Write [{"cloud": "aws", "node_type_id": ...}].')
    return list(content)


def _read(file: str, field: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            content = opened.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise SpecError.of(field, file, "is too large to be one", f"It may have {LARGEST_FILE_BYTES:,} bytes.")
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise SpecError.of(field, file, f"cannot be read ({reason})", "Check the path.") from None


def _parsed(text: str, file: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError.of(field, file, f"is not JSON ({error})", "Check the file.") from None
