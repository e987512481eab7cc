# SPDX-License-Identifier: Apache-2.0
"""A way to train as the settings from which its DeepSpeed configuration is written."""

from __future__ import annotations

from deepspeed_provider.clusters.candidate import Setup
from deepspeed_provider.clusters.settings import steps_on_cpu
from deepspeed_provider.deepspeed_config.buckets import bucket_sizes
from deepspeed_provider.deepspeed_config.generate import BatchTriple, EngineSettings
from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.options import TrainingOptions
from deepspeed_provider.sizing.weights import weights

GRADIENT_CLIPPING = 1.0


def engine_settings(setup: Setup, *, gradient_clipping: float = GRADIENT_CLIPPING) -> EngineSettings:
    """What DeepSpeed must know of it. ``gradient_clipping``: largest global norm of the gradients.

    Raises :class:`SpecError` for an optimizer whose states cannot leave the GPU, where they would.
    """
    options, found = setup.options, weights(setup.architecture, setup.options)
    if options.offloads_optimizer and not steps_on_cpu(options.optimizer):
        raise SpecError([_not_on_cpu(options)])
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
        hidden_size=setup.architecture.hidden_size,
        parameters=setup.architecture.parameters,
        trained_parameters=found.trained,
        largest_parameter=max((*found.trained_sizes, *found.frozen_sizes), default=None),
    )


def _not_on_cpu(options: TrainingOptions) -> FieldProblem:
    return FieldProblem(
        field="optimizer",
        value=options.optimizer.value,
        problem="the best that fits offloads optimizer states, and DeepSpeed steps only Adam on the CPU",
        suggestion="Use adamw, or ask for larger GPUs by node_type or min_compute_capability.",
    )


def with_buckets(architecture: Architecture, options: TrainingOptions) -> TrainingOptions:
    """The options with the bucket sizes that the generated configuration will have, so that they are counted.

    Raises :class:`SpecError` for LoRA targets that the model does not have.
    """
    sizes = bucket_sizes(
        hidden_size=architecture.hidden_size,
        parameters=architecture.parameters,
        trained_parameters=weights(architecture, options).trained,
    )
    return options.model_copy(
        update={
            "reduce_bucket_size": sizes.reduce,
            "allgather_bucket_size": sizes.reduce,
            "stage3_prefetch_bucket_size": sizes.prefetch,
            "stage3_param_persistence_threshold": sizes.persistence_threshold,
        }
    )
