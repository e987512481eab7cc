# SPDX-License-Identifier: Apache-2.0
"""What the checker is told beside the configuration, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from deepspeed_provider.sizing.options import Method


class Severity(StrEnum):
    """Errors fail the run, or silently train something else; warnings waste memory or time, or have no effect."""

    ERROR = "error"
    WARNING = "warning"


class Launcher(StrEnum):
    """Who reads the configuration first: the Hugging Face trainer replaces "auto" by numbers, DeepSpeed does not."""

    DEEPSPEED = "deepspeed"
    HUGGING_FACE = "hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Where and for what the configuration will be used; None is not known, and then not judged.

    Attributes:
        world_size: ranks.
        method: full fine-tune, LoRA or QLoRA.
        launcher: who reads the configuration first.
        model_precision: in which the model was trained: ``fp32``, ``bf16`` or ``fp16``.
        trained_parameters: elements that take gradients.
        use_gpu: False for CPU ranks.
        bf16: whether the GPUs compute in bfloat16.
        has_disk: whether the nodes have drives of their own.
        has_libaio: whether libaio's headers are installed there.
    """

    world_size: int | None = None
    method: Method | None = None
    launcher: Launcher = Launcher.DEEPSPEED
    model_precision: str | None = None
    trained_parameters: int | None = None
    use_gpu: bool | None = None
    bf16: bool | None = None
    has_disk: bool | None = None
    has_libaio: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One place where a rule is broken; ``path`` is dotted, empty for the configuration as a whole."""

    path: str
    value: Any
    problem: str
    suggestion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The same with the rule that was broken. ``problem`` and ``suggestion`` are sentences for people."""

    rule: str
    severity: Severity
    path: str
    value: Any
    problem: str
    suggestion: str

    def __str__(self) -> str:
        place = f"{self.path} = {self.value!r}: " if self.path else ""
        return f"{self.severity}: {place}{self.problem} {self.suggestion}".rstrip()
