# SPDX-License-Identifier: Apache-2.0
"""ZeRO stages: what each can, what each ignores, and sizes that make no sense."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from deepspeed_provider.deepspeed_config.findings import Facts, Found, Severity
from deepspeed_provider.deepspeed_config.rules.rule import Example, Rule, config, zero
from deepspeed_provider.deepspeed_config.subject import AUTO, Subject
from deepspeed_provider.sizing.options import Method

_ZERO: Final = "zero_optimization"
_GATHER: Final = f"{_ZERO}.stage3_gather_16bit_weights_on_model_save"
# Elements: a smaller bucket is bound by the latency of its collective, a larger one takes over 10 GB in bf16.
_SMALLEST_BUCKET: Final = 100_000
_LARGEST_BUCKET: Final = 5_000_000_000
# Elements: below it the optimizer starts thousands of kernels, or swaps thousands of files, each step.
_SMALLEST_SUB_GROUP: Final = 1_000_000


def _not_read(subject: Subject) -> Iterable[Found]:
    stage = subject.stage
    for name, value in subject.section(_ZERO).items():
        path = f"{_ZERO}.{name}"
        visit = next((visit for visit in subject.visits if visit.path == path), None)
        stages = visit.field.stages if visit is not None and visit.field is not None else None
        # Offloads and refusals have rules of their own.
        if stages is None or stage in stages or name in ("offload_param", "offload_optimizer", "compute_grad_norm"):
            continue
        if value is None or value == AUTO:
            continue
        which = " or ".join(map(str, stages))
        text = f"has no effect at stage {stage}: it is read at stage {which} only."
        hint = f"Remove it, or use stage {which}."
        yield Found(path=path, value=value, problem=text, suggestion=hint)


def _qlora(subject: Subject) -> Iterable[Found]:
    if subject.facts.method is Method.QLORA and subject.stage == 3:
        text = "QLoRA's packed 4-bit weights cannot be partitioned."
        yield Found(path=f"{_ZERO}.stage", value=3, problem=text, suggestion="Use stage 2, or LoRA with stage 3.")


def _no_whole_weights(subject: Subject) -> Iterable[Found]:
    old = subject.on(f"{_ZERO}.stage3_gather_fp16_weights_on_model_save")
    if subject.stage == 3 and not subject.on(_GATHER) and not old:
        text = "save_16bit_model() then writes no weights at stage 3, where each rank holds a shard."
        yield Found(path=_GATHER, value=subject.written(_GATHER), problem=text, suggestion="Set it to true.")


def _legacy(subject: Subject) -> Iterable[Found]:
    path = f"{_ZERO}.legacy_stage1"
    if subject.on(path) and subject.stage > 0:
        yield Found(path=path, value=True, problem="DeepSpeed has dropped it.", suggestion="Remove it.")


def _norm(subject: Subject) -> Iterable[Found]:
    path = f"{_ZERO}.compute_grad_norm"
    if subject.on(path):
        return
    if subject.stage not in (1, 2):
        text = f"can be turned off at stages 1 and 2 only, not at {subject.stage}."
        yield Found(path=path, value=False, problem=text, suggestion="Remove it.")
    elif subject.number("gradient_clipping") != 0:
        text = "is needed for clipping, which is on at 1.0 unless gradient_clipping says otherwise."
        yield Found(path=path, value=False, problem=text, suggestion="Remove it, or set gradient_clipping to 0.")


def _summed(subject: Subject) -> Iterable[Found]:
    path = "gradient_allreduce_op"
    value = subject.get(path)
    name = value.lower() if isinstance(value, str) else value
    if name not in ("mean", "sum"):
        yield Found(path=path, value=value, problem="is not 'mean' or 'sum'.", suggestion="Use 'mean'.")
    if name != "sum":
        return
    against = {
        "ZeRO stage 3": subject.stage == 3,
        "ZenFlow": bool(subject.section(f"{_ZERO}.zenflow")),
        "DeepCompile": subject.on("compile.deepcompile"),
    }
    for other, there in against.items():
        if there:
            text = f"DeepSpeed does not sum gradients with {other}."
            yield Found(path=path, value=value, problem=text, suggestion="Use 'mean'.")


def _own_accumulation(subject: Subject) -> Iterable[Found]:
    path = "managed_gradient_accumulation"
    if subject.on(path):
        return
    if subject.on(f"{_ZERO}.overlap_comm") and subject.stage < 2:
        text = f"cannot be turned off at stage {subject.stage} while communication overlaps."
        yield Found(path=path, value=False, problem=text, suggestion="Set zero_optimization.overlap_comm to false.")
    if subject.on("compile.deepcompile"):
        text = "cannot be turned off with DeepCompile."
        yield Found(path=path, value=False, problem=text, suggestion="Remove it.")


def _odd_sizes(subject: Subject) -> Iterable[Found]:
    trained = subject.facts.trained_parameters
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        size = subject.number(f"{_ZERO}.{name}")
        if subject.written(f"{_ZERO}.{name}") is None or size is None:
            continue
        smallest = min(_SMALLEST_BUCKET, trained or _SMALLEST_BUCKET)
        largest = _LARGEST_BUCKET if trained is None else min(_LARGEST_BUCKET, trained)
        if not smallest <= size <= largest:
            yield Found(
                path=f"{_ZERO}.{name}", value=size, problem=_odd(size, smallest, trained), suggestion=_H_SQUARED
            )
    group = subject.number(f"{_ZERO}.sub_group_size")
    if subject.stage == 3 and group is not None and group < min(_SMALLEST_SUB_GROUP, trained or _SMALLEST_SUB_GROUP):
        text = "makes the optimizer step in tiny pieces."
        hint = "Use 1000000000, or less only where the step runs out of memory."
        yield Found(path=f"{_ZERO}.sub_group_size", value=group, problem=text, suggestion=hint)


_H_SQUARED: Final = "The square of the hidden size is usual, at most what is trained."


def _odd(size: float, smallest: int, trained: int | None) -> str:
    if size < smallest:
        return f"{size:g} elements make a collective of latency alone."
    if trained is not None and size > trained:
        return f"is allocated whole, but only {trained} elements are trained."
    return f"takes {size * 2 / 1e9:.0f} GB in bf16."


def _prefetch(subject: Subject) -> Iterable[Found]:
    path = f"{_ZERO}.stage3_prefetch_bucket_size"
    ahead, live = subject.number(path), subject.number(f"{_ZERO}.stage3_max_live_parameters")
    if subject.stage == 3 and ahead is not None and live is not None and ahead > live:
        text = f"is more than stage3_max_live_parameters, {live:g}, lets be gathered."
        yield Found(path=path, value=subject.written(path), problem=text, suggestion="Use a tenth of it.")


RULES: Final = (
    Rule(
        name="no-effect-at-stage",
        severity=Severity.WARNING,
        why="The engine does not hand the field to this stage's optimizer.",
        find=_not_read,
        accepted=Example(zero(3, stage3_max_live_parameters=1_000_000_000)),
        refused=Example(zero(2, stage3_max_live_parameters=1_000_000_000)),
    ),
    Rule(
        name="qlora-at-stage-3",
        severity=Severity.ERROR,
        why="bitsandbytes' 4-bit weights are not floating point, so ZeRO 3 cannot shard them.",
        find=_qlora,
        accepted=Example(zero(2), Facts(method=Method.QLORA)),
        refused=Example(zero(3), Facts(method=Method.QLORA)),
    ),
    Rule(
        name="weights-not-gathered",
        severity=Severity.WARNING,
        why="Without gathering there is no model folder at the end, only shards.",
        find=_no_whole_weights,
        accepted=Example(zero(3)),
        refused=Example(config(zero_optimization={"stage": 3})),
    ),
    Rule(
        name="legacy-stage-1",
        severity=Severity.ERROR,
        why="The engine raises for the old implementation of stage 1.",
        find=_legacy,
        accepted=Example(zero(1, legacy_stage1=False)),
        refused=Example(zero(1, legacy_stage1=True)),
    ),
    Rule(
        name="norm-needed",
        severity=Severity.ERROR,
        why="DeepSpeed refuses compute_grad_norm false at other stages, and where gradients are clipped.",
        find=_norm,
        accepted=Example(zero(2, compute_grad_norm=False) | {"gradient_clipping": 0.0}),
        refused=Example(zero(3, compute_grad_norm=False)),
    ),
    Rule(
        name="allreduce-op",
        severity=Severity.ERROR,
        why="DeepSpeed refuses other operations, and sums at stage 3, with ZenFlow and with DeepCompile.",
        find=_summed,
        accepted=Example(zero(2) | {"gradient_allreduce_op": "sum"}),
        refused=Example(zero(3) | {"gradient_allreduce_op": "sum"}),
    ),
    Rule(
        name="own-accumulation",
        severity=Severity.ERROR,
        why="The engine asserts it: below stage 2 overlapping needs managed accumulation.",
        find=_own_accumulation,
        accepted=Example(zero(1, overlap_comm=False) | {"managed_gradient_accumulation": False}),
        refused=Example(zero(1, overlap_comm=True) | {"managed_gradient_accumulation": False}),
    ),
    Rule(
        name="odd-size",
        severity=Severity.WARNING,
        why="Tiny buckets and sub-groups cost time, large ones memory that nothing fills.",
        find=_odd_sizes,
        accepted=Example(zero(2, reduce_bucket_size=10_000_000), Facts(trained_parameters=40_000_000)),
        refused=Example(zero(2, reduce_bucket_size=500_000_000), Facts(trained_parameters=40_000_000)),
    ),
    Rule(
        name="prefetch-beyond-live",
        severity=Severity.WARNING,
        why="Stage 3 never gathers more than stage3_max_live_parameters.",
        find=_prefetch,
        accepted=Example(zero(3, stage3_prefetch_bucket_size=50_000_000)),
        refused=Example(zero(3, stage3_prefetch_bucket_size=50_000_000, stage3_max_live_parameters=1_000_000)),
    ),
)
