# SPDX-License-Identifier: Apache-2.0
"""Memory of the fullest GPU, at each moment of a step at which it can peak."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed_provider.sizing import model_states
from deepspeed_provider.sizing.activations import Moment, moments
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.decoder import Mode
from deepspeed_provider.sizing.options import Attention, Method, Padding, TrainingOptions
from deepspeed_provider.sizing.overhead import CUBLAS_WORKSPACE_BYTES, Step, overhead
from deepspeed_provider.sizing.parts import Part, present
from deepspeed_provider.sizing.states import PRECISIONS
from deepspeed_provider.sizing.weights import Weights, unquantized_width

_TAPE = "what autograd keeps of transformers' model code"
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


# Moments before any gradient has gone to its rank.
NONE_REDUCED = frozenset({"last layer forward", "head"})


def gpu_parts(architecture: Architecture, weights: Weights, options: TrainingOptions) -> tuple[tuple[Part, ...], str]:
    """(parts at the peak, the moment's name)."""
    candidates = parts_by_moment(architecture, weights, options)
    allocated = {moment: sum(part.bytes for part in parts) for moment, parts in candidates.items()}
    name = max(allocated, key=lambda moment: allocated[moment])
    held = {
        moment: allocated[moment] + overhead(overhead_step(candidates[moment], options)).fragmentation
        for moment in allocated
    }
    worst = max(held, key=lambda moment: held[moment])
    step = overhead_step(candidates[worst], options)
    return present([*candidates[name], *_outside(step, held[worst] - allocated[name])]), name


def parts_by_moment(architecture: Architecture, weights: Weights, options: TrainingOptions) -> dict[str, list[Part]]:
    """What is allocated at each moment at which a step can peak, in the step's order."""
    resident = _resident(weights, options)
    how = mode(architecture, weights, options)
    found = {
        moment.name: [*resident, *_at(moment, architecture, weights, options)]
        for moment in moments(architecture, how, checkpointing=options.gradient_checkpointing)
    }
    if options.zero_stage < 2 and options.world_size > 1:
        found["gradient reduction"] = [*resident, *model_states.reduction(architecture, weights, options)]
    if options.zero_stage:
        found["gradient norm"] = [*resident, *model_states.norm(architecture, weights, options)]
    found["optimizer step"] = [*resident, *model_states.step(architecture, weights, options)]
    return found


def mode(architecture: Architecture, weights: Weights, options: TrainingOptions) -> Mode:
    """How the layers run under these options."""
    width = PRECISIONS[options.precision].weight
    wide = unquantized_width(options)
    ranks = {} if weights.adapters is None else {linear.role: rank for linear, rank in weights.adapters.ranks.items()}
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
        adapter_ranks=tuple(sorted(ranks.items())),
        adapter_dropout=options.lora_dropout > 0,
        quantised=options.method is Method.QLORA,
        attention=Attention.EAGER.value if eager else options.attention.value,
        loss=options.loss.value,
        holds_logits=options.holds_outputs,
    )


def _resident(weights: Weights, options: TrainingOptions) -> list[Part]:
    return [*model_states.weight_parts(weights, options), *model_states.optimizer_parts(weights, options), _cublas()]


def _cublas() -> Part:
    return Part(
        name="cublas_workspace",
        bytes=CUBLAS_WORKSPACE_BYTES,
        formula="2 x 8.125 MiB",
        source="one workspace each for the forward and the backward thread",
    )


def _at(moment: Moment, architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    kept_in_place = options.zero_stage < 2 and options.gradient_accumulation_steps == 1
    sizes = _sizes(architecture, options)
    flight = moment.beyond_kept_gradients if kept_in_place else moment.gradient_in_flight
    return [
        model_states.kept_gradients(
            weights, options, made=moment.gradients_done, reduced=moment.name not in NONE_REDUCED
        ),
        Part(
            name="gradient_in_flight",
            bytes=flight,
            formula="gradient of the weight that is being worked on",
            numbers={"bytes": flight},
            source=_TAPE,
        ),
        *model_states.zero_buffers(architecture, weights, options),
        *(
            Part(
                name=name,
                bytes=size,
                formula=_ACTIVATION_FORMULAS[name],
                numbers=sizes,
                source=_TAPE,
            )
            for name, size in moment.activations.items()
        ),
    ]


_ACTIVATION_FORMULAS = {
    "checkpoints": "L x tokens x h x stream width",
    "layer_activations": "L x what autograd keeps of a layer",
    "working_layer": "one layer's backward pass (and recomputation, when checkpointing)",
    "logits_and_loss": "tokens x V x (logits, log-probabilities and their gradients)",
    "attention_mask": "batch x s x s booleans",
    "position_tables": "sine and cosine of each position",
}


def _sizes(architecture: Architecture, options: TrainingOptions) -> dict[str, float]:
    return {
        "L": architecture.num_layers,
        "tokens": options.tokens,
        "h": architecture.hidden_size,
        "V": architecture.vocab_size,
        "s": options.sequence_length,
    }


def overhead_step(parts: Iterable[Part], options: TrainingOptions) -> Step:
    """What of these parts the overhead depends on."""
    sizes = {part.name: part.bytes for part in parts}
    return Step(
        moving_bytes=sum(size for name, size in sizes.items() if name in MOVING),
        logits_bytes=sizes.get("logits_and_loss", 0),
        gathers=options.zero_stage == 3 and options.world_size > 1,
        lengths_change=options.padding is Padding.LONGEST,
        world_size=options.world_size,
    )


def _outside(step: Step, fragmentation: int) -> list[Part]:
    """``fragmentation``: what the allocator has come to hold at its worst moment, beyond the peak of the tensors."""
    found = overhead(step)
    return [
        Part(
            name="fragmentation",
            bytes=fragmentation,
            formula="most that is held at any moment (tensors + fixed + share x what moves, + logits, where lengths "
            "change) - most tensors",
            numbers={"moving": step.moving_bytes, "logits": step.logits_bytes},
            source="reserved against allocated memory, measured",
        ),
        Part(
            name="cuda_context",
            bytes=found.cuda_context,
            formula="constant",
            source="process memory beside the allocator",
        ),
        Part(name="nccl", bytes=found.nccl, formula="constant, with more than one GPU", source="communicator buffers"),
    ]
