# SPDX-License-Identifier: Apache-2.0
"""A row of the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed_provider.deepspeed_config.findings import Facts, Found, Severity
from deepspeed_provider.deepspeed_config.subject import Subject


@dataclass(frozen=True, slots=True)
class Example:
    """A configuration, and the facts of its use."""

    config: Mapping[str, Any]
    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that can be wrong.

    Attributes:
        name: stable, for people and for programs.
        severity: of everything that it finds.
        why: what DeepSpeed does with such a configuration.
        find: where the rule is broken.
        accepted: an example without errors in which the rule finds nothing.
        refused: the nearest example in which it does.
    """

    name: str
    severity: Severity
    why: str
    find: Callable[[Subject], Iterable[Found]]
    accepted: Example
    refused: Example


def config(**sections: Any) -> dict[str, Any]:
    """For examples: the least that DeepSpeed takes, and what the example is about."""
    return {"train_micro_batch_size_per_gpu": 1, **sections}


def zero(stage: int, **fields: Any) -> dict[str, Any]:
    """For examples: a configuration at this stage."""
    save = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    return config(zero_optimization={"stage": stage, **save, **fields})
