# SPDX-License-Identifier: Apache-2.0
"""An estimate, and what was wrong with a request, as JSON: the one place where they become dicts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Final

from deepspeed_provider.errors import FieldProblem
from deepspeed_provider.sizing.estimate import GpuMemory, MemoryEstimate, Store
from deepspeed_provider.sizing.parts import Part

LONGEST_VALUE: Final = 200


def estimate_as_json(found: MemoryEstimate, *, model: str, explain: bool = False) -> dict[str, Any]:
    """All sizes in bytes, and exact: ``parts`` of a memory sum to its ``total_bytes``. What the host holds only when
    it needs less is in ``at_other_moments``.

    With ``explain`` each memory also has ``explained``: for each part, its formula with the numbers
    in it, these numbers again as numbers, and its source.
    """
    return {
        "model": model,
        "parameters": dataclasses.asdict(found.parameters),
        "gpu": _gpu(found.gpu) | _explained(found.gpu.parts, explain),
        "host": _host(found.host) | _explained((*found.host.parts, *found.host.at_other_moments), explain),
        "nvme": _store(found.nvme) | _explained(found.nvme.parts, explain),
        "assumptions": list(found.assumptions),
        "warnings": list(found.warnings),
    }


def problems_as_json(problems: Iterable[FieldProblem], *, line: int | None = None) -> dict[str, Any]:
    """``{"error": {"message", "problems"}}``, with the line of a batch where there is one."""
    listed = [dataclasses.replace(problem, value=_plain(problem.value)) for problem in problems]
    error = {
        "message": " ".join(str(problem) for problem in listed),
        "problems": [dataclasses.asdict(problem) for problem in listed],
    }
    return {"error": error} if line is None else {"error": error, "line": line}


def failure_as_json(message: str, *, line: int) -> dict[str, Any]:
    """As for problems, where no field is to blame."""
    return {"error": {"message": message, "problems": []}, "line": line}


def _gpu(memory: GpuMemory) -> dict[str, Any]:
    return {
        "total_bytes": memory.total_bytes,
        "allocated_bytes": memory.allocated_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "peak_at": memory.peak_at,
        "parts": _parts(memory.parts),
    }


def _store(memory: Store) -> dict[str, Any]:
    return {"total_bytes": memory.total_bytes, "parts": _parts(memory.parts)}


def _host(memory: Store) -> dict[str, Any]:
    return _store(memory) | {"peak_at": memory.peak_at, "at_other_moments": _parts(memory.at_other_moments)}


def _parts(parts: Iterable[Part]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[part.name] = sizes.get(part.name, 0) + part.bytes
    return sizes


def _explained(parts: Iterable[Part], wanted: bool) -> dict[str, Any]:
    if not wanted:
        return {}
    return {
        "explained": {
            part.name: {"formula": part.explained(), "numbers": dict(part.numbers), "source": part.source}
            for part in parts
        }
    }


def _plain(value: Any) -> Any:
    """JSON has no infinities and no "not a number"; long values are cut."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
