# SPDX-License-Identifier: Apache-2.0
"""Memory of the fullest GPU, at each moment of a step at which it can peak."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed_provider.sizing import zero
from deepspeed_provider.sizing.activations import Moment, moments
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.decoder import Mode
from deepspeed_provider.sizing.options import Attention, Method, Optimizer, Padding, QuantStorage, TrainingOptions
from deepspeed_provider.sizing.overhead import CUBLAS_WORKSPACE_BYTES, Step, overhead
from deepspeed_provider.sizing.parts import Part, present
from deepspeed_provider.sizing.states import OPTIMIZERS, PRECISIONS, state_bytes
from deepspeed_provider.sizing.weights import Weights, unquantized_width

_ZERO = "Rajbhandari et al. 2020, section 3.1"
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


def gpu_parts(architecture: Architecture, weights: Weights, options: TrainingOptions) -> tuple[tuple[Part, ...], str]:
    """(parts at the peak, the moment's name)."""
    resident = _resident(architecture, weights, options)
    how = mode(architecture, weights, options)
    candidates = [
        (moment.name, _at(moment, architecture, weights, options))
        for moment in moments(architecture, how, checkpointing=options.gradient_checkpointing)
    ]
    candidates.append(("optimizer step", _step(weights, options)))
    name, parts = max(candidates, key=lambda item: sum(part.bytes for part in item[1]))
    return present([*resident, *parts, *_outside(parts, options)]), name


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
        adapter_width=PRECISIONS[options.adapters].weight,
        adapter_ranks=tuple(sorted(ranks.items())),
        adapter_dropout=options.lora_dropout > 0,
        quantised=options.method is Method.QLORA,
        attention=Attention.EAGER.value if eager else options.attention.value,
        loss=options.loss.value,
        holds_logits=options.holds_outputs,
    )


def _shards(options: TrainingOptions, from_stage: int) -> int:
    return options.world_size if options.zero_stage >= from_stage else 1


def _resident(architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    return [*_weight_parts(architecture, weights, options), *_optimizer_parts(weights, options), _cublas()]


def _weight_parts(architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    shards = _shards(options, 3)
    gone = options.offloads_parameters
    packed = 1 if options.quant_storage is QuantStorage.UINT8 else shards
    trained_name = "weights" if weights.adapters is None else "adapter_weights"
    persistent = _persistent(architecture, weights, options) if shards > 1 else 0
    return [
        _copy(trained_name, weights.trained, weights.widths.weight, shards, gone),
        _copy(
            "unquantized_weights" if weights.quantized else "weights",
            weights.frozen,
            weights.frozen_width,
            shards,
            gone,
        ),
        Part(
            name="quantized_weights",
            bytes=0 if gone and packed > 1 else _split(weights.quantized_bytes, packed),
            formula="(Q / 2 + scales) / N",
            numbers={"Q": weights.quantized, "bytes": weights.quantized_bytes, "N": packed},
            source="Dettmers et al. 2023, section 3; bitsandbytes block sizes 64 and 256",
        ),
        Part(
            name="persistent_parameters",
            bytes=persistent,
            formula="small parameters kept whole",
            numbers={"bytes": persistent},
            source="DeepSpeed stage3_param_persistence_threshold",
        ),
    ]


def _copy(name: str, parameters: int, width: int, shards: int, gone: bool) -> Part:
    return Part(
        name=name,
        bytes=0 if gone else _split(parameters * width, shards),
        formula="w x P / N",
        numbers={"w": width, "P": parameters, "N": shards},
        source=_ZERO,
    )


def _persistent(architecture: Architecture, weights: Weights, options: TrainingOptions) -> int:
    threshold = zero.buckets(architecture, options).persistence_threshold
    width = weights.frozen_width or weights.widths.weight
    return width * zero.persistent_elements(architecture, threshold)


def _optimizer_parts(weights: Weights, options: TrainingOptions) -> list[Part]:
    if options.offloads_optimizer:
        return []
    shards, trained = _shards(options, 1), weights.trained
    states = state_bytes(trained, options.optimizer, weights.trained_precision)
    states = 0 if OPTIMIZERS[options.optimizer].paged else states
    return [
        Part(
            name="master_weights",
            bytes=_split(trained * weights.widths.master, shards),
            formula="4 x T / N",
            numbers={"T": trained, "N": shards},
            source=_ZERO,
        ),
        Part(
            name="optimizer_states",
            bytes=_split(states, shards),
            formula="states / N",
            numbers={"states": states, "T": trained, "N": shards},
            source=_ZERO,
        ),
    ]


def _cublas() -> Part:
    return Part(
        name="cublas_workspace",
        bytes=CUBLAS_WORKSPACE_BYTES,
        formula="2 x 8.125 MiB",
        source="one workspace each for the forward and the backward thread",
    )


def _gradients(weights: Weights, options: TrainingOptions, done: float) -> Part:
    """Kept gradients: whole up to stage 1, a partition from stage 2, on the host with an offloaded optimizer."""
    shards = _shards(options, 2)
    all_there = done if options.gradient_accumulation_steps == 1 and options.zero_stage < 3 else 1.0
    on_host = options.offloads_optimizer and options.zero_stage >= 2
    width = weights.widths.gradient
    return Part(
        name="gradients",
        bytes=0 if on_host else _split(round(weights.trained * width * all_there), shards),
        formula="g x T x made / N",
        numbers={"g": width, "T": weights.trained, "made": all_there, "N": shards},
        source=_ZERO,
    )


def _at(moment: Moment, architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    kept_in_place = options.zero_stage < 2 and options.gradient_accumulation_steps == 1
    sizes = _sizes(architecture, options)
    flight = moment.beyond_kept_gradients if kept_in_place else moment.gradient_in_flight
    return [
        _gradients(weights, options, moment.gradients_done),
        Part(
            name="gradient_in_flight",
            bytes=flight,
            formula="gradient of the weight that is being worked on",
            numbers={"bytes": flight},
            source=_TAPE,
        ),
        *_zero_buffers(architecture, weights, options),
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


def _zero_buffers(architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    elements = zero.reduce_buffer_elements(architecture, options)
    parts = [
        Part(
            name="reduce_bucket",
            bytes=elements * weights.widths.gradient,
            formula="buckets x g",
            numbers={"elements": elements, "g": weights.widths.gradient},
            source="DeepSpeed runtime/zero, ipg_buffer",
        )
    ]
    if options.zero_stage == 3 and (options.world_size > 1 or options.offloads_parameters):
        live = zero.live_elements(architecture, options)
        if weights.quantized:
            live = (
                live
                * (weights.quantized_bytes + weights.frozen * weights.frozen_width)
                // (2 * architecture.parameters)
            )
        width = PRECISIONS[options.precision].weight
        parts.append(
            Part(
                name="gathered_parameters",
                bytes=live * width,
                formula="live x w",
                numbers={"live": live, "w": width},
                source="DeepSpeed zero/partitioned_param_coordinator.py, stage3_max_reuse_distance",
            )
        )
    return parts


def _step(weights: Weights, options: TrainingOptions) -> list[Part]:
    """Gradients are all there; DeepSpeed casts its partition of them to fp32 for the step."""
    parts = [_gradients(weights, options, 1.0)]
    shards = _shards(options, 1)
    partition = -(-weights.trained // shards)
    if weights.widths.master and options.zero_stage and not options.offloads_optimizer:
        elements = min(partition, options.sub_group_size) if options.zero_stage == 3 else partition
        parts.append(
            Part(
                name="gradient_fp32_copy",
                bytes=4 * elements,
                formula="4 x min(T / N, sub_group)",
                numbers={"T": weights.trained, "N": shards},
                source="DeepSpeed stage_1_and_2.py and stage3.py: gradients are cast for the step",
            )
        )
    parts += _foreach(weights, options)
    if options.zero_stage in (1, 2) and options.world_size > 1:
        elements = min(options.allgather_bucket_size, weights.trained)
        parts.append(
            Part(
                name="allgather_bucket",
                bytes=elements * weights.widths.weight,
                formula="min(bucket, T) x w",
                numbers={"bucket": options.allgather_bucket_size, "T": weights.trained, "w": weights.widths.weight},
                source="DeepSpeed allgather_bucket_size",
            )
        )
    return parts


def _foreach(weights: Weights, options: TrainingOptions) -> list[Part]:
    """torch's own Adam, by default, takes the square roots of all second moments in one list."""
    if options.zero_stage or weights.widths.master or options.optimizer is not Optimizer.ADAMW:
        return []
    return [
        Part(
            name="optimizer_temporaries",
            bytes=weights.trained * weights.widths.state,
            formula="s x T",
            numbers={"s": weights.widths.state, "T": weights.trained},
            source="torch.optim.adam _multi_tensor_adam: exp_avg_sq_sqrt (none with fused=True)",
        )
    ]


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


def _outside(parts: list[Part], options: TrainingOptions) -> list[Part]:
    step = overhead_step(parts, options)
    found = overhead(step)
    return [
        Part(
            name="fragmentation",
            bytes=found.fragmentation,
            formula="fixed + share x what is made and freed each step (+ logits, where lengths change)",
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


def _split(size: int, shards: int) -> int:
    return -(-size // shards)
