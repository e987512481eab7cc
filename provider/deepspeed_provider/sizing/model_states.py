# SPDX-License-Identifier: Apache-2.0
"""Weights, gradients and optimizer states on one GPU, and the buffers of ZeRO, at each moment of a step.

The sums are those of the ZeRO paper (Rajbhandari et al. 2020, section 3.1); where DeepSpeed 0.19.8 keeps
more than they say, the part's source names the file. ``tests/sizing/test_real_engines.py`` compares each
part with tensors counted in DeepSpeed's engines.
"""

from __future__ import annotations

from deepspeed_provider.sizing import zero
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.buffers import offload_buffer, reduce_bucket
from deepspeed_provider.sizing.options import Optimizer, Precision, TrainingOptions
from deepspeed_provider.sizing.parts import Part
from deepspeed_provider.sizing.states import OPTIMIZERS, scale_formula, state_bytes, state_formula, state_numbers
from deepspeed_provider.sizing.weights import Weights, partitions_packed

_ZERO = "Rajbhandari et al. 2020, section 3.1"
_STAGE_1_AND_2 = "DeepSpeed runtime/zero/stage_1_and_2.py"
_STAGE_3 = "DeepSpeed runtime/zero/stage3.py"
# Elements that stage 0 flattens to reduce them at once (engine.py, MEMORY_OPT_ALLREDUCE_SIZE).
STAGE_0_BUCKET_ELEMENTS = 500_000_000
# Of a gradient on its way to the host, in stage 3, one after the other (stage3.py, _constant_buffered_norm2).
STAGE_3_NORM_ELEMENTS = 250_000_000
EXTENT = "(T + padding) / N"
_REDUCED = "(T + beyond) / N"


def weight_parts(weights: Weights, options: TrainingOptions) -> list[Part]:
    """Trained and frozen weights as they lie between steps."""
    gone = options.offloads_parameters
    ranks = options.world_size if options.zero_stage == 3 else 1
    # Stages 1 and 2 pad all of them, laid end to end, by less than 2 N elements: not counted.
    trained = zero.partition_elements(weights.trained_sizes, stage=3, ranks=ranks)
    found = [
        Part(
            name="weights" if weights.adapters is None else "adapter_weights",
            bytes=0 if gone else trained * weights.widths.weight,
            formula="w * (P + padding) / N",
            numbers={
                "w": weights.widths.weight,
                "P": weights.trained,
                "padding": trained * ranks - weights.trained,
                "N": ranks,
            },
            source=_ZERO,
        )
    ]
    if weights.quantized:
        return [*found, *_packed(weights, options, ranks)]
    if weights.frozen and not gone:
        frozen = zero.partition_elements(weights.frozen_sizes, stage=3, ranks=ranks)
        found.append(
            Part(
                name="weights",
                bytes=frozen * weights.frozen_width,
                formula="w * (P + padding) / N",
                numbers={
                    "w": weights.frozen_width,
                    "P": weights.frozen,
                    "padding": frozen * ranks - weights.frozen,
                    "N": ranks,
                },
                source=_ZERO,
            )
        )
    return found


def _packed(weights: Weights, options: TrainingOptions, ranks: int) -> list[Part]:
    """Weights in 4 bits, with their scales, which are no parameters: ZeRO neither cuts nor moves them."""
    cut = partitions_packed(options)
    ranks_of_packed = ranks if cut else 1
    packed = 0 if cut and options.offloads_parameters else -(-weights.packed_bytes // ranks_of_packed)
    scales = scale_formula(double_quant=options.double_quant)
    return [
        Part(
            name="unquantized_weights",
            bytes=0 if options.offloads_parameters else -(-weights.frozen // ranks) * weights.frozen_width,
            formula="w * ceil(P / N)",
            numbers={"w": weights.frozen_width, "P": weights.frozen, "N": ranks},
            source=_ZERO,
        ),
        Part(
            name="quantized_weights",
            bytes=packed + weights.scale_bytes,
            formula=f"ceil(ceil(Q / 2) / N) + {scales}" if packed else scales,
            numbers={"Q": weights.quantized, "N": ranks_of_packed} if packed else {"Q": weights.quantized},
            source="Dettmers et al. 2023, section 3; bitsandbytes block sizes 64 and 256",
        ),
    ]


def optimizer_parts(weights: Weights, options: TrainingOptions) -> list[Part]:
    """Master weights and optimizer states."""
    if options.offloads_optimizer:
        return []
    elements, width = partition_elements(weights, options), master_width(weights, options)
    states = state_bytes(elements, options.optimizer, weights.trained_precision)
    extent = extent_numbers(weights, options)
    return [
        Part(
            name="master_weights",
            bytes=elements * width,
            formula=f"m * {EXTENT}",
            numbers={"m": width, **extent},
            source=f"{_STAGE_1_AND_2} and stage3.py: the optimizer's copy, also where the weights are fp32"
            if options.zero_stage
            else _ZERO,
        ),
        Part(
            name="optimizer_states",
            bytes=0 if OPTIMIZERS[options.optimizer].paged else states,
            formula=state_formula(options.optimizer, EXTENT),
            numbers={**state_numbers(options.optimizer, weights.trained_precision), **extent},
            source=_ZERO,
        ),
    ]


def extent_numbers(weights: Weights, options: TrainingOptions) -> dict[str, float]:
    """Of :data:`EXTENT`, the elements that one rank's optimizer steps."""
    ranks = _ranks(options)
    padding = partition_elements(weights, options) * ranks - weights.trained
    return {"T": weights.trained, "padding": padding, "N": ranks}


def master_width(weights: Weights, options: TrainingOptions) -> int:
    """Bytes of the optimizer's own copy of a weight: ZeRO makes one even in the weights' own precision."""
    if not options.zero_stage:
        return weights.widths.master
    return 2 if weights.trained_precision is Precision.PURE_BF16 else 4


def partition_elements(weights: Weights, options: TrainingOptions) -> int:
    """Elements that one rank's optimizer steps."""
    return zero.partition_elements(weights.trained_sizes, stage=options.zero_stage, ranks=_ranks(options))


def kept_gradients(weights: Weights, options: TrainingOptions, *, made: float, reduced: bool = True) -> Part:
    """During the backward pass, when the share ``made`` of them is, and whether any of them is ``reduced``.

    Whole and where the weights are up to stage 1; from stage 2 those of the rank's partition, in a buffer
    made with the first of them (the last layers' rank is the first), which lies on the host when the
    optimizer does. A second micro-batch's are added up in a second buffer (stage 2).
    """
    width, stage = weights.widths.gradient, options.zero_stage
    accumulates = options.gradient_accumulation_steps > 1
    if stage < 2:
        elements = round(weights.trained * (1.0 if accumulates else made))
        return Part(
            name="gradients",
            bytes=elements * width,
            formula="g * (T - to_come)",
            numbers={"g": width, "T": weights.trained, "to_come": weights.trained - elements},
            source=_ZERO,
        )
    copies = int(reduced or stage == 3) + int(accumulates and stage == 2)
    elements = 0 if options.offloads_optimizer else copies * reduced_gradient_elements(weights, options)
    return Part(
        name="gradients",
        bytes=elements * width,
        formula=f"copies * g * {_REDUCED}",
        numbers={"copies": copies, "g": width, **_reduced_numbers(weights, options)} if elements else {},
        source=f"{_STAGE_1_AND_2}: copy_grads_in_partition; stage3.py: flat buffer",
    )


def _reduced_numbers(weights: Weights, options: TrainingOptions) -> dict[str, float]:
    """Of the elements that the fullest rank keeps: ``beyond`` is padding, or what tensors have in others' shares."""
    ranks = _ranks(options)
    beyond = reduced_gradient_elements(weights, options) * ranks - weights.trained
    return {"T": weights.trained, "beyond": beyond, "N": ranks}


def reduced_gradient_elements(weights: Weights, options: TrainingOptions) -> int:
    """That the fullest rank keeps for its step."""
    return zero.kept_gradient_elements(weights.trained_sizes, stage=options.zero_stage, ranks=_ranks(options))


def ordinary_loop(weights: Weights, options: TrainingOptions) -> bool:
    """Whether torch's optimizer steps the weights themselves, with the gradients as they are, on one GPU: without
    ZeRO and without master weights no engine is needed."""
    return not options.zero_stage and options.world_size == 1 and not weights.widths.master


def between_passes(architecture: Architecture, weights: Weights, options: TrainingOptions) -> dict[str, list[Part]]:
    """What is there beside what is resident, at each moment after the backward pass."""
    found = {}
    if options.zero_stage < 2 and not ordinary_loop(weights, options):
        found["gradient reduction"] = reduction(architecture, weights, options)
    if options.zero_stage and not options.offloads_optimizer:
        found["gradient norm"] = norm(architecture, weights, options)
    found["optimizer step"] = step(architecture, weights, options)
    return found


def reduction(architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    """After the backward pass, in stages 0 and 1: all gradients, and a copy of those being reduced."""
    width = weights.widths.gradient
    if options.zero_stage:
        elements = 0 if options.offloads_optimizer else reduced_gradient_elements(weights, options)
        formula, numbers = f"g * {_REDUCED}", _reduced_numbers(weights, options) if elements else {}
        source = f"{_STAGE_1_AND_2}, grads_in_partition"
    else:
        elements = min(weights.trained, STAGE_0_BUCKET_ELEMENTS)
        formula, numbers = "g * min(T, bucket)", {"T": weights.trained, "bucket": STAGE_0_BUCKET_ELEMENTS}
        source = "DeepSpeed runtime/engine.py, allreduce_bucket"
    in_double = [gradient_in_double(weights, options)] if options.zero_stage and options.offloads_optimizer else []
    return [
        kept_gradients(weights, options, made=1.0),
        reduce_bucket(architecture, weights, options),
        *offload_buffer(weights, options),
        *in_double,
        Part(
            name="gradients_being_reduced",
            bytes=elements * width,
            formula=formula,
            numbers={"g": width, **numbers},
            source=source,
        ),
    ]


def norm(architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    """Before the step, ZeRO takes the gradients' norm in double precision, one tensor's share after the other."""
    return [*_gradients_to_step(architecture, weights, options), gradient_in_double(weights, options)]


def gradient_in_double(weights: Weights, options: TrainingOptions) -> Part:
    """The largest tensor's share, for its norm; with an offloaded optimizer taken on its way to the host."""
    largest = max(weights.trained_sizes, default=0)
    numbers: dict[str, float]
    if options.zero_stage == 3:
        piece = -(-largest // options.world_size)
        formula, numbers = "8 * ceil(largest / N)", {"largest": largest, "N": options.world_size}
        if options.offloads_optimizer:
            piece = min(piece, STAGE_3_NORM_ELEMENTS)
            formula, numbers = "8 * min(ceil(largest / N), piece)", {**numbers, "piece": STAGE_3_NORM_ELEMENTS}
    else:
        piece = min(largest, partition_elements(weights, options))
        formula, numbers = f"8 * min(largest, {EXTENT})", {"largest": largest, **extent_numbers(weights, options)}
    return Part(
        name="gradient_in_double",
        bytes=8 * piece,
        formula=formula,
        numbers=numbers,
        source=f"{_STAGE_1_AND_2}, get_grad_norm_direct and set_norm_for_param_grad_in_gpu; "
        "stage3.py, _constant_buffered_norm2; runtime/zero/utils.py, get_norm_dtype",
    )


def step(architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    """The optimizer's step: gradients flattened, then cast to the master weights' precision."""
    if options.offloads_optimizer:
        # Stage 3's bucket stays; all else happens on the host.
        bucket = [reduce_bucket(architecture, weights, options)] if options.zero_stage == 3 else []
        return [*bucket, *offload_buffer(weights, options)]
    return [
        *_gradients_to_step(architecture, weights, options),
        *_copies_for_step(weights, options),
        *_foreach(weights, options),
    ]


def _gradients_to_step(architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    width = weights.widths.gradient
    kept = reduced_gradient_elements(weights, options)
    parts = [
        Part(
            name="gradients",
            bytes=kept * width,
            formula=f"g * {_REDUCED}",
            numbers={"g": width, **_reduced_numbers(weights, options)},
            source=_ZERO if not options.zero_stage else f"{_STAGE_1_AND_2}, averaged_gradients",
        )
    ]
    if options.zero_stage == 3:
        parts.append(reduce_bucket(architecture, weights, options))
    return parts


def _copies_for_step(weights: Weights, options: TrainingOptions) -> list[Part]:
    if ordinary_loop(weights, options):
        return []
    stepped, formula, numbers = partition_elements(weights, options), EXTENT, extent_numbers(weights, options)
    if options.zero_stage == 3 and options.sub_group_size < stepped:
        sizes, limit = weights.trained_sizes, options.sub_group_size
        stepped = zero.sub_group_elements(sizes, ranks=options.world_size, limit=limit)
        formula, numbers = "sub_group", {"sub_group": stepped}
    gradient, master = weights.widths.gradient, master_width(weights, options)
    return [
        Part(
            name="gradients_flattened",
            bytes=stepped * gradient if options.zero_stage else 0,
            formula=f"g * {formula}",
            numbers={"g": gradient, **numbers},
            source=f"{_STAGE_1_AND_2}, step; stage3.py, _prepare_fp32_grad_for_sub_group",
        ),
        Part(
            name="gradient_fp32_copy",
            bytes=stepped * master if master > gradient else 0,
            formula=f"m * {formula}",
            numbers={"m": master, **numbers},
            source=f"{_STAGE_1_AND_2} and stage3.py, single_grad_partition; fp16/unfused_optimizer.py (stage 0)",
        ),
    ]


def _foreach(weights: Weights, options: TrainingOptions) -> list[Part]:
    """torch's own Adam, by default, takes the square roots of all second moments in one list."""
    if options.zero_stage or weights.widths.master or options.optimizer is not Optimizer.ADAMW:
        return []
    return [
        Part(
            name="optimizer_temporaries",
            bytes=weights.trained * weights.widths.state,
            formula="s * T",
            numbers={"s": weights.widths.state, "T": weights.trained},
            source="torch.optim.adam _multi_tensor_adam: exp_avg_sq_sqrt (none with fused=True)",
        )
    ]


def _ranks(options: TrainingOptions) -> int:
    """Among which ZeRO divides the optimizer's states."""
    return options.world_size if options.zero_stage else 1
