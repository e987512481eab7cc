# SPDX-License-Identifier: Apache-2.0
"""A candidate as the settings from which its DeepSpeed configuration is written."""

from __future__ import annotations

from deepspeed_provider.clusters.candidate import Candidate
from deepspeed_provider.deepspeed_config.generate import BatchTriple, EngineSettings
from deepspeed_provider.sizing.weights import weights

GRADIENT_CLIPPING = 1.0


def engine_settings(candidate: Candidate, *, gradient_clipping: float = GRADIENT_CLIPPING) -> EngineSettings:
    """What DeepSpeed must know of it. ``gradient_clipping``: largest global norm of the gradients."""
    options, found = candidate.options, weights(candidate.architecture, candidate.options)
    return EngineSettings(
        batch=BatchTriple(
            micro_batch_size=options.micro_batch_size,
            gradient_accumulation_steps=options.gradient_accumulation_steps,
            world_size=options.world_size,
        ),
        zero_stage=options.zero_stage,
        precision=options.precision.value,
        gradient_clipping=gradient_clipping,
        offload=options.offload,
        offload_device=options.offload_device,
        hidden_size=candidate.architecture.hidden_size,
        parameters=candidate.architecture.parameters,
        trained_parameters=found.trained,
        largest_parameter=max((*found.trained_sizes, *found.frozen_sizes), default=None),
    )
