# SPDX-License-Identifier: Apache-2.0
"""How a model is trained, as far as memory depends on it; validated once, all problems at once."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deepspeed_provider.errors import FieldProblem, SpecError, did_you_mean, nearest
from deepspeed_provider.loose_values import refuse_bool, split_names


class Method(StrEnum):
    """Which weights are trained."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Precision(StrEnum):
    """Of weights and matrix products; fp16 and bf16 keep fp32 master weights and states, pure-bf16 keeps neither."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    PURE_BF16 = "pure-bf16"


class Offload(StrEnum):
    """What ZeRO moves off the GPU."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"
    ALL = "all"


class OffloadDevice(StrEnum):
    """Where it goes."""

    CPU = "cpu"
    NVME = "nvme"


class Attention(StrEnum):
    """The attention code. ``sdpa`` is counted with a padding mask, which keeps it off the flash kernel."""

    EAGER = "eager"
    SDPA = "sdpa"
    FLASH = "flash"


class Loss(StrEnum):
    """``full``: all logits in fp32, as transformers does. ``kernel``: cross-entropy in one kernel that reads
    the logits as they are. ``chunked``: in fp32 one piece of the tokens at a time (torchtune). ``fused``:
    head and cross-entropy in one kernel, no logits kept (Liger)."""

    FULL = "full"
    KERNEL = "kernel"
    CHUNKED = "chunked"
    FUSED = "fused"


class Padding(StrEnum):
    """To what a batch's sequences are padded: always to the sequence length (or packed), or to its own longest."""

    MAX_LENGTH = "max-length"
    LONGEST = "longest"


class QuantStorage(StrEnum):
    """Type in which the packed 4-bit weights are stored; ZeRO 3 can partition only floating-point ones."""

    UINT8 = "uint8"
    BF16 = "bf16"


class Optimizer(StrEnum):
    """One row of :data:`deepspeed_provider.sizing.states.OPTIMIZERS` each."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw-8bit"
    PAGED_ADAMW = "paged-adamw"
    PAGED_ADAMW_8BIT = "paged-adamw-8bit"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"


def _token(value: Any) -> Any:
    """Choices are written with dashes; underscores and capitals are understood."""
    return value.strip().lower().replace("_", "-") if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1)]
Size = Annotated[int, BeforeValidator(refuse_bool), Field(ge=0)]


class TrainingOptions(BaseModel):
    """One way to train a model. Sizes in elements or tokens, as DeepSpeed's configuration has them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Annotated[Method, BeforeValidator(_token)] = Method.FULL
    precision: Annotated[Precision, BeforeValidator(_token)] = Precision.BF16
    optimizer: Annotated[Optimizer, BeforeValidator(_token)] = Optimizer.ADAMW
    zero_stage: Annotated[int, BeforeValidator(refuse_bool), Field(ge=0, le=3)] = 0
    offload: Annotated[Offload, BeforeValidator(_token)] = Offload.NONE
    offload_device: Annotated[OffloadDevice, BeforeValidator(_token)] = OffloadDevice.CPU
    gpus_per_node: Count = 1
    nodes: Count = 1
    micro_batch_size: Count = 1
    sequence_length: Count = 2048
    gradient_accumulation_steps: Count = 1
    gradient_checkpointing: bool = True
    attention: Annotated[Attention, BeforeValidator(_token)] = Attention.SDPA
    loss: Annotated[Loss, BeforeValidator(_token)] = Loss.FULL
    padding: Annotated[Padding, BeforeValidator(_token)] = Padding.MAX_LENGTH
    holds_outputs: bool = True
    lora_rank: Count = 16
    lora_targets: Annotated[tuple[str, ...], BeforeValidator(split_names), Field(min_length=1)] = ("all-linear",)
    lora_dropout: Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, lt=1)] = 0.0
    adapter_precision: Annotated[Precision, BeforeValidator(_token)] | None = None
    double_quant: bool = True
    quant_storage: Annotated[QuantStorage, BeforeValidator(_token)] | None = None
    upcast_unquantized: bool | None = None
    quantize_experts: bool = True
    reduce_bucket_size: Size | None = None
    allgather_bucket_size: Size = 500_000_000
    stage3_prefetch_bucket_size: Size | None = None
    stage3_param_persistence_threshold: Size | None = None
    stage3_max_live_parameters: Size = 1_000_000_000
    stage3_max_reuse_distance: Size = 1_000_000_000
    sub_group_size: Size = 1_000_000_000
    overlap_comm: bool | None = None
    load_in_turn: bool = False

    @property
    def world_size(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one GPU."""
        return self.micro_batch_size * self.sequence_length

    @property
    def adapters(self) -> Precision:
        """Precision of adapter weights: PEFT makes them fp32 unless told otherwise."""
        if self.adapter_precision is not None:
            return self.adapter_precision
        return Precision.PURE_BF16 if self.precision is Precision.PURE_BF16 else Precision.FP32

    @property
    def storage(self) -> QuantStorage:
        """Of packed weights: what is needed at stage 3 for partitioning them, bitsandbytes' own type else."""
        if self.quant_storage is not None:
            return self.quant_storage
        return QuantStorage.BF16 if self.zero_stage == 3 else QuantStorage.UINT8

    @property
    def upcasts(self) -> bool:
        """Whether what is not quantised is fp32: PEFT's preparation does that, but partitions of stage 3 take one
        type only."""
        return self.zero_stage < 3 if self.upcast_unquantized is None else self.upcast_unquantized

    @property
    def overlaps(self) -> bool:
        """DeepSpeed's default: overlap communication in stage 3 only."""
        return self.zero_stage == 3 if self.overlap_comm is None else self.overlap_comm

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload in (Offload.OPTIMIZER, Offload.ALL)

    @property
    def offloads_parameters(self) -> bool:
        return self.offload in (Offload.PARAMETERS, Offload.ALL)


def parse_options(values: Mapping[str, Any]) -> TrainingOptions:
    """Options from loose values (strings are read as numbers). Raises :class:`SpecError` with every problem."""
    problems: list[FieldProblem] = []
    given = {name: value for name, value in values.items() if value is not None}
    try:
        options = TrainingOptions(**given)
    except ValidationError as error:
        found = [_problem(given, item) for item in error.errors(include_url=False, include_context=False)]
        problems = [problem for index, problem in enumerate(found) if problem not in found[:index]]
        wrong = {problem.field for problem in problems}
        options = TrainingOptions.model_construct(**_valid(given, wrong))
        # One that reads a value which is wrong would speak of the default in its place.
        together = {"zero_stage", "offload", "offload_device"}
        hidden = together if wrong & together else wrong
        problems += [problem for problem in _contradictions(options) if problem.field not in hidden]
        raise SpecError(problems) from None
    problems = _contradictions(options)
    if problems:
        raise SpecError(problems)
    return options


def _valid(given: Mapping[str, Any], wrong: set[str]) -> dict[str, Any]:
    kept = {name: value for name, value in given.items() if name not in wrong and name in TrainingOptions.model_fields}
    return TrainingOptions(**kept).__dict__ if kept else {}


def _problem(given: Mapping[str, Any], error: Mapping[str, Any]) -> FieldProblem:
    name = str(error["loc"][0])
    value = given.get(name)
    field = TrainingOptions.model_fields.get(name)
    if field is None:
        hint = did_you_mean(name, TrainingOptions.model_fields)
        return FieldProblem(field=name, value=value, problem="there is no such option", suggestion=hint)
    choices = _choices(field.annotation)
    if choices:
        near = nearest(_token(value), choices, cutoff=0.4)
        hint = f"Did you mean {near!r}?" if near else f"Try {choices[0]!r}."
        return FieldProblem(field=name, value=value, problem=f"should be one of {', '.join(choices)}", suggestion=hint)
    text = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if name == "lora_targets":
        text = "should be at least 1 name, several separated by commas"
        return FieldProblem(field=name, value=value, problem=text, suggestion="Try 'q,k,v,o' or 'all-linear'.")
    return FieldProblem(field=name, value=value, problem=text, suggestion=f"The default is {field.default!r}.")


def _choices(annotation: Any) -> list[str]:
    inner = get_args(annotation)
    for candidate in (annotation, *inner, *(deepest for part in inner for deepest in get_args(part))):
        if isinstance(candidate, type) and issubclass(candidate, StrEnum):
            return [item.value for item in candidate]
    return []


def _contradictions(options: TrainingOptions) -> list[FieldProblem]:
    """What each option allows by itself but DeepSpeed refuses, or silently ignores, together."""
    found = []
    if options.offloads_parameters and options.zero_stage < 3:
        found.append(
            FieldProblem(
                field="offload",
                value=options.offload.value,
                problem=f"ZeRO stage {options.zero_stage} cannot offload parameters",
                suggestion="Use zero_stage 3, or offload 'optimizer'.",
            )
        )
    elif options.offload is not Offload.NONE and options.zero_stage == 0:
        found.append(
            FieldProblem(
                field="offload",
                value=options.offload.value,
                problem="there is no offload without ZeRO",
                suggestion="Use zero_stage 1, 2 or 3.",
            )
        )
    if options.offload is not Offload.NONE and options.offload_device is OffloadDevice.NVME and options.zero_stage < 3:
        found.append(
            FieldProblem(
                field="offload_device",
                value="nvme",
                problem=f"ZeRO stage {options.zero_stage} offloads to the CPU only",
                suggestion="Use zero_stage 3, or offload_device 'cpu'.",
            )
        )
    if options.adapter_precision is Precision.FP16:
        found.append(
            FieldProblem(
                field="adapter_precision",
                value="fp16",
                problem="adapters in fp16 do not train under a gradient scaler",
                suggestion="Use fp32 or bf16.",
            )
        )
    return found
