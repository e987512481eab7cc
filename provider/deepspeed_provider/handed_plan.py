# SPDX-License-Identifier: Apache-2.0
"""A plan of a cluster as one task hands it to another: as much of its JSON as is read again. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from deepspeed_provider.clusters.gpus import gpu
from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.planning import Hardware

# In place of a plan: whoever needs it plans by itself.
AUTO: Final = "auto"
LONGEST_VALUE: Final = 80


@dataclass(frozen=True, kw_only=True)
class Settings:
    nodes: int
    gpus_per_node: int
    micro_batch_size: int
    gradient_checkpointing: bool


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """``usd_per_hour`` is of the whole cluster, its driver included; None where no price is known."""

    gpu: str
    settings: Settings
    # Of hardware that is there, none of these is known.
    node_type_id: str | None = None
    cloud: str | None = None
    usd_per_hour: float | None = None

    def __str__(self) -> str:
        machine = self.node_type_id or f"{self.settings.gpus_per_node} {self.gpu}"
        return f"{self.settings.nodes} x {machine}"


@dataclass(frozen=True, kw_only=True)
class HandedPlan:
    """``cluster``: the body ``new_cluster`` of the Jobs API; None for hardware that is there."""

    model: str
    method: str
    lora_rank: int | None
    optimizer: str
    sequence_length: int
    effective_batch_size: int
    chosen: Chosen
    deepspeed_config: dict[str, Any]
    cluster: dict[str, Any] | None = None

    @property
    def hardware(self) -> Hardware:
        settings = self.chosen.settings
        return Hardware(nodes=settings.nodes, gpus_per_node=settings.gpus_per_node, bf16=gpu(self.chosen.gpu).bf16)

    def to_json(self) -> dict[str, Any]:
        """What ``read_plan`` reads."""
        return dataclasses.asdict(self)


def read_plan(given: object) -> HandedPlan:
    """``given``: what ``GpuPlanOperator`` returns, what ``deepspeed-provider plan --json`` prints, or a part of it.

    An object, or its JSON text. Raises :class:`SpecError` for what is no plan, or one that found nothing.
    """
    if isinstance(given, HandedPlan):
        return given
    content = read_object(given, "plan", "Hand over what GpuPlanOperator returns, or 'auto'.")
    if "chosen" in content and content["chosen"] is None:
        raise SpecError([field_problem("plan", content.get("model"), "found nothing that fits", "Ask for less.")])
    try:
        return _PLANS.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        text = f"is no plan of a cluster ({'.'.join(map(str, first['loc']))}: {first['msg']})"
        works = "Hand over all of what GpuPlanOperator returns."
        raise SpecError([field_problem("plan", sorted(map(str, content)), text, works)]) from None


def read_object(given: object, field: str, works: str) -> dict[str, Any]:
    """An object, or one as JSON text. Raises :class:`SpecError`."""
    content = given
    if isinstance(given, str):
        try:
            content = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise SpecError([field_problem(field, given, f"is not JSON ({error})", works)]) from None
    if not isinstance(content, Mapping):
        raise SpecError([field_problem(field, given, "is no JSON object", works)])
    return dict(content)


def field_problem(field: str, value: object, problem: str, suggestion: str) -> FieldProblem:
    """With a long text cut."""
    if isinstance(value, str) and len(value) > LONGEST_VALUE:
        value = f"{value[:LONGEST_VALUE]}…"
    return FieldProblem(field=field, value=value, problem=problem, suggestion=suggestion)


_PLANS: Final = TypeAdapter(HandedPlan)
