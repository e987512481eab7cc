# SPDX-License-Identifier: Apache-2.0
"""The one JSON document that a training or evaluation job receives.

Standard library only: this module is read by the planner on the Airflow side and travels to the
cluster with the rest of ``training``. Values arrive here already validated (``spec.py``).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

WIRE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which causal language model: a folder, a URI the cluster can read, or a hub id."""

    ref: str
    revision: str | None = None
    attention: str = "sdpa"
    """As transformers names it; ``sdpa`` means ``eager`` for a model class without it."""
    precision: str = "fp32"
    """Training precision: ``fp32``, ``bf16`` or ``fp16``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSettings:
    """``full`` or ``lora``; the LoRA fields are ignored by ``full``."""

    name: str
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Module names, or ``("all-linear",)`` for every linear layer but the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationSettings:
    """How long and how fast. Exactly one of ``max_steps`` and ``epochs`` is set.

    A step is one optimizer step: ``micro_batch_size`` x ``gradient_accumulation_steps`` x world size
    sequences of at most ``sequence_length`` tokens.
    """

    learning_rate: float
    micro_batch_size: int
    gradient_accumulation_steps: int
    sequence_length: int
    max_steps: int | None = None
    epochs: float | None = None
    warmup_ratio: float = 0.05
    schedule: str = "cosine"
    """``cosine``, ``linear`` or ``constant`` after the linear warm-up."""
    weight_decay: float = 0.0
    eval_steps: int = 0
    """Held-out evaluation each N steps besides the one at the end; 0 makes only that."""
    eval_rows: int | None = None
    """At most so many held-out rows in the evaluations of the training; None takes all."""
    seed: int = 42
    gradient_checkpointing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSettings:
    """The MLflow run made beforehand by the operator. Credentials are the cluster's own."""

    tracking_uri: str
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """What an evaluation job compares: the plan's model (base) and the tuned model folder."""

    tuned_uri: str
    rows: int | None = None
    """At most so many held-out rows; None takes all."""
    generations: int = 5
    max_new_tokens: int = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Everything that the ranks need to know.

    Attributes:
        job: ``finetune`` or ``evaluate``.
        token: identity of the run; part of no file name, written into results.
        output_uri: folder URI for ``progress.json``, ``progress.jsonl``, ``result.json``,
            ``failure-rank<N>.json`` and ``model/``.
        cache_uri: folder URI shared by runs for converted base models.
        world_size: ranks that must be there; anything else is refused at once.
        dataset_uri: folder with ``train/`` and ``heldout/`` Parquet (columns ``prompt``, nullable,
            and ``completion``) and ``dataset.json``.
        deepspeed_config: complete, without "auto"; empty for an evaluation.
        merge_adapter: save LoRA merged into the base weights; else adapter and base separately.
    """

    job: str
    token: str
    output_uri: str
    cache_uri: str
    world_size: int
    model: ModelSettings
    dataset_uri: str
    method: MethodSettings
    optimization: OptimizationSettings
    deepspeed_config: dict[str, Any]
    use_gpu: bool = True
    merge_adapter: bool = True
    tracking: TrackingSettings | None = None
    evaluation: EvaluationSettings | None = None
    version: int = WIRE_VERSION

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, wire: dict[str, Any]) -> TrainingPlan:
        """Rebuilds the plan; raises ValueError for a plan of another version or with unknown keys."""
        if wire.get("version") != WIRE_VERSION:
            raise ValueError(f"plan version {wire.get('version')!r}, but this code reads version {WIRE_VERSION}")
        return typing.cast("TrainingPlan", _build(cls, wire))


def _build(cls: type, wire: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    unknown = set(wire) - set(hints)
    if unknown:
        raise ValueError(f"unknown keys in {cls.__name__}: {', '.join(sorted(unknown))}")
    return cls(**{name: _convert(hints[name], value) for name, value in wire.items()})


def _convert(hint: Any, value: Any) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return _build(typing.cast(type, option), value)
        if typing.get_origin(option) is tuple and isinstance(value, list):
            return tuple(value)
    return value
