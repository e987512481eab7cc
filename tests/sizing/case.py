# SPDX-License-Identifier: Apache-2.0
"""One training step for the fake-tensor oracle to count, and what the estimator says of the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed_provider.sizing.activations import Moment, moments
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.gpu import mode
from deepspeed_provider.sizing.options import TrainingOptions, parse_options
from deepspeed_provider.sizing.states import state_bytes
from deepspeed_provider.sizing.weights import Weights, weights


@dataclass(frozen=True, kw_only=True)
class Case:
    """``config`` is the model's config.json; ``gradients_freed``: each as soon as it is there."""

    config: dict[str, Any]
    method: str = "full"
    micro_batch_size: int = 1
    sequence_length: int = 512
    gradient_checkpointing: bool = True
    gradients_freed: bool = True
    lora_rank: int = 16
    lora_targets: str | list[str] = "all-linear"
    attention: str = "sdpa"
    double_quant: bool = True

    @property
    def label(self) -> str:
        targets = "+".join(self.lora_targets) if isinstance(self.lora_targets, list) else self.lora_targets
        adapters = "" if self.method == "full" else f"-r{self.lora_rank}-{targets}"
        checkpointing = "checkpointed" if self.gradient_checkpointing else "plain"
        gradients = "freed" if self.gradients_freed else "kept"
        hidden = self.config.get("hidden_size", self.config.get("n_embd"))
        sizes = f"h{hidden}-{self.micro_batch_size}x{self.sequence_length}"
        return f"{self.config['model_type']}-{sizes}-{self.method}{adapters}-{checkpointing}-{gradients}"

    @property
    def options(self) -> TrainingOptions:
        """The oracle's loop has no fp32 master weights, and PEFT's fp32 adapters."""
        adapter = {} if self.method == "full" else {"adapter_precision": "fp32"}
        return parse_options(
            {
                "method": self.method,
                "precision": "pure-bf16",
                "micro_batch_size": self.micro_batch_size,
                "sequence_length": self.sequence_length,
                "gradient_checkpointing": self.gradient_checkpointing,
                "lora_rank": self.lora_rank,
                "lora_targets": self.lora_targets,
                "attention": self.attention,
                "double_quant": self.double_quant,
                **adapter,
            }
        )


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """Bytes. ``resident`` is there all the time: weights, and optimizer states where a step is made."""

    resident: int
    activations: int
    moment: str


def estimated(case: Case) -> Estimated:
    """By the same functions that make up an estimate, without what is not a tensor of the model."""
    model, options = architecture(case.config), case.options
    found = weights(model, options)
    at = {moment.name: _beside_weights(moment, case, found) for moment in _moments(model, found, options)}
    top = max(at, key=lambda name: at[name])
    return Estimated(resident=_resident(case, found, options), activations=at[top], moment=top)


def _moments(model: Architecture, found: Weights, options: TrainingOptions) -> tuple[Moment, ...]:
    return moments(model, mode(model, found, options), checkpointing=options.gradient_checkpointing)


def _beside_weights(moment: Moment, case: Case, found: Weights) -> int:
    if case.gradients_freed:
        return moment.activation_bytes + moment.gradient_in_flight
    kept = round(found.trained * found.widths.gradient * moment.gradients_done)
    return moment.activation_bytes + moment.beyond_kept_gradients + kept


def _resident(case: Case, found: Weights, options: TrainingOptions) -> int:
    held = found.trained * found.widths.weight + found.frozen * found.frozen_width + found.quantized_bytes
    if case.gradients_freed:
        return held
    return held + state_bytes(found.trained, options.optimizer, found.trained_precision)
