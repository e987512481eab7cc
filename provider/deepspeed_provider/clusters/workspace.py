# SPDX-License-Identifier: Apache-2.0
"""What one workspace has, by its own answers to ``clusters/list-node-types`` and ``clusters/spark-versions``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from deepspeed_provider.clusters.node_type import FRACTIONS, NodeType
from deepspeed_provider.errors import FieldProblem, SpecError

STATUS_REASONS: Final = {
    "NotAvailableInRegion": "not available in this workspace's region",
    "NotEnabledOnSubscription": "not enabled on this workspace's subscription",
}


@dataclass(frozen=True, kw_only=True)
class WorkspaceOffers:
    """What a workspace says that it has.

    Attributes:
        node_types: its answer to list-node-types, as it came.
        spark_versions: keys of its runtimes.
    """

    node_types: Mapping[str, Any]
    spark_versions: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class WorkspaceTypes:
    """A catalogue seen from one workspace.

    Attributes:
        available: node types that it can launch, with ids as it spells them.
        missing: why each other node type is not among them, by id.
        unknown_gpu_types: ids that have GPUs there but are not in the catalogue: reported, never guessed.
        warnings: where the answer contradicts the catalogue.
    """

    available: tuple[NodeType, ...]
    missing: Mapping[str, str]
    unknown_gpu_types: tuple[str, ...]
    warnings: tuple[str, ...]


def restricted(node_types: Iterable[NodeType], answer: Mapping[str, Any]) -> WorkspaceTypes:
    """The catalogue restricted to a saved answer, as the API gives it (raw JSON: clients drop Azure's core quota).

    Raises :class:`SpecError` for what is no such answer.
    """
    entries = _entries(answer)
    available: list[NodeType] = []
    missing: dict[str, str] = {}
    warnings: list[str] = []
    known: set[str] = set()
    for node in node_types:
        spelled = next((key for key in map(str.casefold, (node.node_type_id, *node.aliases)) if key in entries), None)
        if spelled is None:
            missing[node.node_type_id] = "not in this workspace"
            continue
        known.add(spelled)
        entry = entries[spelled]
        reason = _refusal(entry, node)
        if reason:
            missing[node.node_type_id] = reason
            continue
        machines = _most_machines(entry, node)
        available.append(dataclasses.replace(node, node_type_id=entry["node_type_id"], most_machines=machines))
        count = entry.get("num_gpus")
        if count is not None and count != node.gpus:
            warnings.append(f"{entry['node_type_id']}: this workspace counts {count} GPUs, the catalogue {node.gpus}")
    unknown = [key for key, entry in entries.items() if key not in known and (entry.get("num_gpus") or 0) > 0]
    missing |= {entries[key]["node_type_id"]: f"has {FRACTIONS[key]}" for key in unknown if key in FRACTIONS}
    return WorkspaceTypes(
        available=tuple(available),
        missing=missing,
        unknown_gpu_types=tuple(sorted(entries[key]["node_type_id"] for key in unknown if key not in FRACTIONS)),
        warnings=tuple(warnings),
    )


def _entries(answer: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The answer's node types by id in one case."""
    listed = answer.get("node_types") if isinstance(answer, Mapping) else None
    if not isinstance(listed, list):
        raise SpecError([_no_answer(answer)])
    return {
        entry["node_type_id"].casefold(): entry
        for entry in listed
        if isinstance(entry, Mapping) and isinstance(entry.get("node_type_id"), str)
    }


def _no_answer(answer: Any) -> FieldProblem:
    shown = sorted(answer) if isinstance(answer, Mapping) else type(answer).__name__
    return FieldProblem(
        field="node_types",
        value=shown,
        problem="is no answer of list-node-types, which has a list called node_types",
        suggestion="Save it with `databricks clusters list-node-types --output json`.",
    )


def _refusal(entry: Mapping[str, Any], node: NodeType) -> str:
    """Why the workspace would not launch this type; empty where it would."""
    info = entry.get("node_info") or {}
    statuses = info.get("status") or []
    reasons = [STATUS_REASONS.get(status, str(status)) for status in statuses]
    if entry.get("is_deprecated"):
        reasons.append("deprecated in this workspace")
    if entry.get("is_hidden"):
        reasons.append("hidden in this workspace")
    quota = _core_quota(entry)
    if quota is not None and quota < node.cores:
        reasons.append(f"needs {node.cores} cores of quota, {quota} are left of {info.get('total_core_quota', '?')}")
    return "; ".join(reasons)


def _core_quota(entry: Mapping[str, Any]) -> int | None:
    """Cores of this type that may still be started; Azure tells."""
    quota = (entry.get("node_info") or {}).get("available_core_quota")
    return quota if isinstance(quota, int) else None


def _most_machines(entry: Mapping[str, Any], node: NodeType) -> int | None:
    quota = _core_quota(entry)
    return None if quota is None else quota // node.cores
