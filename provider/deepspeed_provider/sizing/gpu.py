# SPDX-License-Identifier: Apache-2.0
"""Memory of the fullest GPU, at each moment of a step at which it can peak."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from deepspeed_provider.sizing import model_states
from deepspeed_provider.sizing.activations import GIVEN_AWAY, Moment, moments
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.buffers import zero_buffers
from deepspeed_provider.sizing.mode import Mode
from deepspeed_provider.sizing.options import Attention, Method, Padding, TrainingOptions
from deepspeed_provider.sizing.overhead import CALIBRATION, CUBLAS_WORKSPACE_BYTES, MIB, Step, overhead
from deepspeed_provider.sizing.parts import Part, present
from deepspeed_provider.sizing.replayed import with_formula
from deepspeed_provider.sizing.states import PRECISIONS
from deepspeed_provider.sizing.weights import Weights, unquantized_width
from deepspeed_provider.sizing.zero import buckets

MOVING = frozenset(
    {
        "checkpoints",
        "layer_activations",
        "working_layer",
        "logits_and_loss",
        "attention_mask",
        "position_tables",
        "gradient_in_flight",
        "gathered_parameters",
    }
)


_CUBLAS: Final = Part(
    name="cublas_workspace",
    bytes=CUBLAS_WORKSPACE_BYTES,
    formula="threads * workspace",
    numbers={"threads": 2, "workspace": CUBLAS_WORKSPACE_BYTES // 2},
    source="one workspace each for the forward and the backward thread",
)
# Moments before any gradient has gone to its rank.
NONE_REDUCED = frozenset({"last layer forward", "head"})


def gpu_parts(architecture: Architecture, weights: Weights, options: TrainingOptions) -> tuple[tuple[Part, ...], str]:
    """(parts at the peak, the moment's name)."""
    how = mode(architecture, weights, options)
    candidates = _by_moment(architecture, weights, options, how)
    allocated = {moment: sum(part.bytes for part in parts) for moment, parts in candidates.items()}
    name = max(allocated, key=lambda moment: allocated[moment])
    steps = {moment: overhead_step(parts, options) for moment, parts in candidates.items()}
    held = {moment: allocated[moment] + overhead(step).fragmentation for moment, step in steps.items()}
    worst = max(held, key=lambda moment: held[moment])
    tensors = [with_formula(part, architecture, how) for part in present(candidates[name])]
    lost = _fragmentation(steps[worst], held[worst], tensors_then=allocated[worst], most_tensors=allocated[name])
    return (*tensors, *present([lost, *_beside(steps[worst])])), name


def parts_by_moment(architecture: Architecture, weights: Weights, options: TrainingOptions) -> dict[str, list[Part]]:
    """What is allocated at each moment at which a step can peak, in the step's order; without replays' formulas."""
    return _by_moment(architecture, weights, options, mode(architecture, weights, options))


def _by_moment(
    architecture: Architecture, weights: Weights, options: TrainingOptions, how: Mode
) -> dict[str, list[Part]]:
    resident = _resident(weights, options)
    buffers = zero_buffers(architecture, weights, options)
    norm_at = normed_on_the_way(architecture, weights, options)
    found = {
        moment.name: [*resident, *buffers, *_at(moment, weights, options, norm_at)]
        for moment in moments(architecture, how, checkpointing=options.gradient_checkpointing)
        if moment.name in norm_at or moment.name not in GIVEN_AWAY
    }
    for name, parts in model_states.between_passes(architecture, weights, options).items():
        found[name] = [*resident, *parts]
    return found


def mode(architecture: Architecture, weights: Weights, options: TrainingOptions) -> Mode:
    """How the layers run under these options."""
    width = PRECISIONS[options.precision].weight
    wide = unquantized_width(options)
    ranks = () if weights.adapters is None else tuple(weights.adapters.ranks.items())
    unfused = not architecture.fused_attention or architecture.attention_softcap
    eager = options.attention is Attention.SDPA and unfused
    return Mode(
        micro_batch_size=options.micro_batch_size,
        sequence_length=options.sequence_length,
        compute_width=width,
        stream_width=wide,
        head_width=wide,
        trains_base=options.method is Method.FULL,
        adapter_width=weights.widths.weight,
        adapter_ranks=ranks,
        adapter_dropout=options.lora_dropout > 0,
        quantised=options.method is Method.QLORA,
        attention=Attention.EAGER.value if eager else options.attention.value,
        loss=options.loss.value,
        holds_logits=options.holds_outputs,
    )


def _resident(weights: Weights, options: TrainingOptions) -> list[Part]:
    return [*model_states.weight_parts(weights, options), *model_states.optimizer_parts(weights, options), _CUBLAS]


def normed_on_the_way(architecture: Architecture, weights: Weights, options: TrainingOptions) -> frozenset[str]:
    """The moments of the backward pass at which gradients are in double precision, see
    :func:`model_states.gradient_in_double`: only where they go to the host as they are made.

    A head's gradient that does not fit in the bucket leaves with the next one, before the last layer's
    backward step; else with what fills the bucket.
    """
    if options.zero_stage < 2 or not options.offloads_optimizer:
        return frozenset()
    if max(weights.trained_sizes, default=0) > buckets(architecture, options).reduce:
        return GIVEN_AWAY
    return frozenset({"last layer", "embedding reduced"})


def _at(moment: Moment, weights: Weights, options: TrainingOptions, norm_at: frozenset[str]) -> list[Part]:
    kept_in_place = options.zero_stage < 2 and options.gradient_accumulation_steps == 1
    flight = moment.beyond_kept_gradients if kept_in_place else moment.gradient_in_flight
    return [
        *gradients_at(moment.name, moment.gradients_done, weights, options, norm_at),
        Part(name="gradient_in_flight", bytes=flight),
        *(Part(name=name, bytes=size) for name, size in moment.activations.items()),
    ]


def gradients_at(
    moment: str, done: float, weights: Weights, options: TrainingOptions, norm_at: frozenset[str]
) -> list[Part]:
    """Gradients that are kept at a moment, when the share ``done`` of them is, and the one that is normed.

    Before any is done (a shared weight's waits for the embedding's; adapters come later) none is normed.
    """
    kept = model_states.kept_gradients(weights, options, made=done, reduced=moment not in NONE_REDUCED)
    return [kept, model_states.gradient_in_double(weights, options)] if done and moment in norm_at else [kept]


def overhead_step(parts: Iterable[Part], options: TrainingOptions) -> Step:
    """What of these parts the overhead depends on."""
    moving = logits = 0
    for part in parts:
        if part.name in MOVING:
            moving += part.bytes
            logits += part.bytes if part.name == "logits_and_loss" else 0
    return Step(
        moving_bytes=moving,
        logits_bytes=logits,
        gathers=options.zero_stage == 3 and options.world_size > 1,
        lengths_change=options.padding is Padding.LONGEST,
        world_size=options.world_size,
    )


def _fragmentation(step: Step, held: int, *, tensors_then: int, most_tensors: int) -> Part:
    """What the allocator has come to hold at its worst moment, ``held``, beyond the peak of the tensors."""
    kind = CALIBRATION.gathered if step.gathers else CALIBRATION.in_place
    formula = "tensors_then + fixed + share * moving"
    numbers = {
        "tensors_then": tensors_then,
        "fixed": kind.fixed_bytes,
        "share": kind.moving_share,
        "moving": step.moving_bytes,
    }
    if step.lengths_change:
        formula += " + changing * logits"
        numbers |= {"changing": CALIBRATION.changing_lengths, "logits": step.logits_bytes}
    return Part(
        name="fragmentation",
        bytes=held - most_tensors,
        formula=f"{formula} - most_tensors",
        numbers={**numbers, "most_tensors": most_tensors},
        source="reserved against allocated memory, measured",
    )


def _beside(step: Step) -> list[Part]:
    found = overhead(step)
    return [
        Part(
            name=name,
            bytes=size,
            formula="measured * MiB",
            numbers={"measured": size / MIB, "MiB": MIB},
            source=source,
        )
        for name, size, source in (
            ("cuda_context", found.cuda_context, "process memory beside the allocator"),
            ("nccl", found.nccl, "communicators' channels and buffers, with more than one GPU"),
        )
    ]
