# SPDX-License-Identifier: Apache-2.0
"""Weights, gradients and optimizer states on one GPU, and the buffers of ZeRO, at each moment of a step.

The sums are those of the ZeRO paper (Rajbhandari et al. 2020, section 3.1); where DeepSpeed 0.19.8 keeps
more than they say, the part's source names the file. ``tests/sizing/test_real_engines.py`` compares each
part with tensors counted in DeepSpeed's engines.
"""

from __future__ import annotations

from deepspeed_provider.sizing import zero
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.options import Optimizer, Precision, QuantStorage, TrainingOptions
from deepspeed_provider.sizing.parts import Part
from deepspeed_provider.sizing.states import OPTIMIZERS, PRECISIONS, state_bytes
from deepspeed_provider.sizing.weights import Weights

_ZERO = "Rajbhandari et al. 2020, section 3.1"
_STAGE_1_AND_2 = "DeepSpeed runtime/zero/stage_1_and_2.py"
_STAGE_3 = "DeepSpeed runtime/zero/stage3.py"
# Elements that stage 0 flattens to reduce them at once (engine.py, MEMORY_OPT_ALLREDUCE_SIZE).
STAGE_0_BUCKET_ELEMENTS = 500_000_000


def weight_parts(weights: Weights, options: TrainingOptions) -> list[Part]:
    """Trained and frozen weights as they lie between steps."""
    gone = options.offloads_parameters
    ranks = options.world_size if options.zero_stage == 3 else 1
    packed = 1 if options.storage is QuantStorage.UINT8 else ranks
    # Stages 1 and 2 pad all of them, laid end to end, by less than 2 N elements: not counted.
    trained = zero.partition_elements(weights.trained_sizes, stage=3, ranks=ranks)
    frozen = -(-weights.frozen // ranks)
    if not weights.quantized:
        frozen = zero.partition_elements(weights.frozen_sizes, stage=3, ranks=ranks)
    return [
        Part(
            name="weights" if weights.adapters is None else "adapter_weights",
            bytes=0 if gone else trained * weights.widths.weight,
            formula="w x P / N",
            numbers={"w": weights.widths.weight, "P": weights.trained, "N": ranks},
            source=_ZERO,
        ),
        Part(
            name="unquantized_weights" if weights.quantized else "weights",
            bytes=0 if gone else frozen * weights.frozen_width,
            formula="w x P / N",
            numbers={"w": weights.frozen_width, "P": weights.frozen, "N": ranks},
            source=_ZERO,
        ),
        Part(
            name="quantized_weights",
            bytes=0 if gone and packed > 1 else -(-weights.quantized_bytes // packed),
            formula="(Q / 2 + scales) / N",
            numbers={"Q": weights.quantized, "bytes": weights.quantized_bytes, "N": packed},
            source="Dettmers et al. 2023, section 3; bitsandbytes block sizes 64 and 256",
        ),
    ]


def optimizer_parts(weights: Weights, options: TrainingOptions) -> list[Part]:
    """Master weights and optimizer states."""
    if options.offloads_optimizer:
        return []
    elements, ranks = partition_elements(weights, options), _ranks(options)
    width = master_width(weights, options)
    states = state_bytes(elements, options.optimizer, weights.trained_precision)
    return [
        Part(
            name="master_weights",
            bytes=elements * width,
            formula="m x T / N",
            numbers={"m": width, "T": weights.trained, "N": ranks},
            source=f"{_STAGE_1_AND_2} and stage3.py: the optimizer's copy, also where the weights are fp32"
            if options.zero_stage
            else _ZERO,
        ),
        Part(
            name="optimizer_states",
            bytes=0 if OPTIMIZERS[options.optimizer].paged else states,
            formula="states of T / N",
            numbers={"states": states, "T": weights.trained, "N": ranks},
            source=_ZERO,
        ),
    ]


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
        elements, copies = round(weights.trained * (1.0 if accumulates else made)), 1
    else:
        elements = reduced_gradient_elements(weights, options)
        copies = int(reduced or stage == 3) + int(accumulates and stage == 2)
    return Part(
        name="gradients",
        bytes=0 if stage >= 2 and options.offloads_optimizer else copies * elements * width,
        formula="copies x g x elements",
        numbers={"copies": copies, "g": width, "elements": elements, "T": weights.trained, "N": _ranks(options)},
        source=_ZERO if stage < 2 else f"{_STAGE_1_AND_2}: copy_grads_in_partition; stage3.py: flat buffer",
    )


def reduced_gradient_elements(weights: Weights, options: TrainingOptions) -> int:
    """That the fullest rank keeps for its step."""
    return zero.kept_gradient_elements(weights.trained_sizes, stage=options.zero_stage, ranks=_ranks(options))


def zero_buffers(architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    """What ZeRO holds during forward and backward pass beside the states."""
    found = [reduce_bucket(architecture, weights, options), *offload_buffer(weights, options)]
    if options.zero_stage < 3:
        return found
    width = PRECISIONS[options.precision].weight
    if options.world_size > 1 or options.offloads_parameters:
        live = zero.live_elements(architecture, options)
        if weights.quantized:
            whole = weights.quantized_bytes + weights.frozen * weights.frozen_width
            live = live * whole // (2 * architecture.parameters)
        found.append(
            Part(
                name="gathered_parameters",
                bytes=live * width,
                formula="live x w",
                numbers={"live": live, "w": width},
                source="DeepSpeed runtime/zero/partitioned_param_coordinator.py, stage3_max_reuse_distance",
            )
        )
    if options.world_size > 1:
        threshold = zero.buckets(architecture, options).persistence_threshold
        trained = zero.persistent_elements(weights.trained_sizes, threshold)
        frozen = zero.persistent_elements(weights.frozen_sizes, threshold)
        found.append(
            Part(
                name="persistent_parameters",
                bytes=trained * weights.widths.weight + frozen * weights.frozen_width,
                formula="tensors up to the threshold, whole",
                numbers={"trained": trained, "frozen": frozen, "threshold": threshold},
                source="DeepSpeed runtime/zero/parameter_offload.py, stage3_param_persistence_threshold",
            )
        )
    return found


def reduce_bucket(architecture: Architecture, weights: Weights, options: TrainingOptions) -> Part:
    """Gradients on their way: made for each backward pass in stages 1 and 2, there always in stage 3."""
    elements = zero.reduce_buffer_elements(architecture, options)
    return Part(
        name="reduce_bucket",
        bytes=elements * weights.widths.gradient,
        formula="buckets x g",
        numbers={"elements": elements, "g": weights.widths.gradient},
        source=f"{_STAGE_1_AND_2}, setup_buckets; stage3.py, _setup_for_real_optimizer",
    )


def offload_buffer(weights: Weights, options: TrainingOptions) -> list[Part]:
    """On the GPU, of the largest gradient, through which stages 1 and 2 add up gradients of the host."""
    if not options.offloads_optimizer or options.zero_stage == 3:
        return []
    largest = max(weights.trained_sizes, default=0)
    return [
        Part(
            name="offload_buffer",
            bytes=largest * weights.widths.weight,
            formula="w x largest tensor",
            numbers={"w": weights.widths.weight, "largest": largest},
            source=f"{_STAGE_1_AND_2}, temp_grad_buffer_for_gpu_offload",
        )
    ]


def reduction(architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    """After the backward pass, in stages 0 and 1: all gradients, and a copy of those being reduced."""
    width, elements = weights.widths.gradient, min(weights.trained, STAGE_0_BUCKET_ELEMENTS)
    source = "DeepSpeed runtime/engine.py, allreduce_bucket"
    if options.zero_stage == 1:
        elements = 0 if options.offloads_optimizer else reduced_gradient_elements(weights, options)
        source = f"{_STAGE_1_AND_2}, grads_in_partition"
    return [
        kept_gradients(weights, options, made=1.0),
        reduce_bucket(architecture, weights, options),
        *offload_buffer(weights, options),
        Part(
            name="gradients_being_reduced",
            bytes=elements * width,
            formula="g x elements",
            numbers={"g": width, "elements": elements},
            source=source,
        ),
    ]


def norm(architecture: Architecture, weights: Weights, options: TrainingOptions) -> list[Part]:
    """Before the step, ZeRO takes the gradients' norm in double precision, one tensor's share after the other."""
    if options.offloads_optimizer:
        return []
    largest, share = max(weights.trained_sizes, default=0), partition_elements(weights, options)
    piece = -(-largest // options.world_size) if options.zero_stage == 3 else min(largest, share)
    return [
        *_gradients_to_step(architecture, weights, options),
        Part(
            name="gradient_in_double",
            bytes=8 * piece,
            formula="8 x largest tensor's share",
            numbers={"largest": largest, "share": piece},
            source=f"{_STAGE_1_AND_2}, get_grad_norm_direct; runtime/zero/utils.py, get_norm_dtype",
        ),
    ]


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
            formula="g x elements",
            numbers={"g": width, "elements": kept, "T": weights.trained, "N": _ranks(options)},
            source=_ZERO if not options.zero_stage else f"{_STAGE_1_AND_2}, averaged_gradients",
        )
    ]
    if options.zero_stage == 3:
        parts.append(reduce_bucket(architecture, weights, options))
    return parts


def _copies_for_step(weights: Weights, options: TrainingOptions) -> list[Part]:
    if not options.zero_stage and options.world_size == 1:
        # An ordinary loop: the optimizer takes the gradients as they are.
        return []
    stepped = partition_elements(weights, options)
    if options.zero_stage == 3:
        sizes, limit = weights.trained_sizes, options.sub_group_size
        stepped = zero.sub_group_elements(sizes, ranks=options.world_size, limit=limit)
    gradient, master = weights.widths.gradient, master_width(weights, options)
    return [
        Part(
            name="gradients_flattened",
            bytes=stepped * gradient if options.zero_stage else 0,
            formula="g x stepped",
            numbers={"g": gradient, "stepped": stepped},
            source=f"{_STAGE_1_AND_2}, step; stage3.py, _prepare_fp32_grad_for_sub_group",
        ),
        Part(
            name="gradient_fp32_copy",
            bytes=stepped * master if master > gradient else 0,
            formula="4 x stepped",
            numbers={"stepped": stepped, "T": weights.trained, "N": _ranks(options)},
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
            formula="s x T",
            numbers={"s": weights.widths.state, "T": weights.trained},
            source="torch.optim.adam _multi_tensor_adam: exp_avg_sq_sqrt (none with fused=True)",
        )
    ]


def _ranks(options: TrainingOptions) -> int:
    """Among which ZeRO divides the optimizer's states."""
    return options.world_size if options.zero_stage else 1
