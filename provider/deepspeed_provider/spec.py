# SPDX-License-Identifier: Apache-2.0
"""What a user asks for, parsed and validated once; after that nobody checks again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from deepspeed_provider.credentials import looks_secret, secret_problem
from deepspeed_provider.errors import FieldProblem, SpecError, did_you_mean, nearest
from deepspeed_provider.loose_values import refuse_bool, split_names

DOCSTRINGS = "docstrings"
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")

# Learning rate by method where none is given. LoRA: took SmolLM2-135M from perplexity 33 to 9 in 60
# steps; full: the usual order of magnitude for fine-tuning every weight with AdamW.
DEFAULT_LEARNING_RATE = {"lora": 5e-4, "full": 2e-5}
DEFAULT_MICRO_BATCH_SIZE = 4


class Method(StrEnum):
    """How the model's weights are changed."""

    LORA = "lora"
    FULL = "full"


class Precision(StrEnum):
    """Training precision; ``auto`` takes what the hardware does best."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Schedule(StrEnum):
    """Learning rate after the linear warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


Int = Annotated[int, BeforeValidator(refuse_bool)]
Float = Annotated[float, BeforeValidator(refuse_bool), Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^\S(.*\S)?$")]
Names = Annotated[tuple[Name, ...], BeforeValidator(split_names), Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class FineTuneSpec:
    """One fine-tune, as asked for.

    Attributes:
        model: a hub id, a folder, or a URI that the cluster can read.
        data: ``docstrings`` (the installed libraries' documentation as questions and answers) or the
            URI of a JSONL, Parquet or CSV file, or of a folder of them, with prompt/completion or text
            columns.
        max_steps: optimizer steps; exactly one of ``max_steps`` and ``epochs`` is set, and where the
            user gives neither it is one epoch.
        learning_rate: peak of the schedule.
        sequence_length: tokens; longer examples are cut.
        effective_batch_size: sequences per optimizer step, over all ranks. Equal to
            ``micro_batch_size`` x ``gradient_accumulation_steps`` x ``ranks``; what is left out follows.
        ranks: training processes (world size).
        max_perplexity_ratio: the gate before registration: the tuned model's held-out perplexity must
            be below this share of the base model's.
        heldout_fraction: share of the rows kept for evaluation.
        eval_steps: held-out evaluation each N steps of the training; 0 evaluates at its end only.
        evaluation_rows: at most so many held-out rows in each evaluation; None takes all.
        generations: sample answers of base and tuned model shown side by side.
    """

    model: Name
    model_revision: Name | None = None
    method: Method = Method.LORA
    data: Name = DOCSTRINGS
    heldout_fraction: Annotated[Float, Field(gt=0, lt=1)] = 0.1
    max_steps: Annotated[Int, Field(ge=1, le=10_000_000)] | None = None
    epochs: Annotated[Float, Field(gt=0, le=1000)] | None = None
    learning_rate: Annotated[Float, Field(gt=0, le=1)] | None = None
    sequence_length: Annotated[Int, Field(ge=8, le=1_048_576)] = 512
    effective_batch_size: Annotated[Int, Field(ge=1, le=1_048_576)] | None = None
    micro_batch_size: Annotated[Int, Field(ge=1, le=65_536)] | None = None
    gradient_accumulation_steps: Annotated[Int, Field(ge=1, le=65_536)] | None = None
    lora_rank: Annotated[Int, Field(ge=1, le=1024)] = 16
    lora_alpha: Annotated[Int, Field(ge=1, le=8192)] = 32
    lora_dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    lora_targets: Names = ("all-linear",)
    zero_stage: Annotated[Int, Field(ge=0, le=3)] = 2
    gradient_checkpointing: bool = False
    precision: Precision = Precision.AUTO
    warmup_ratio: Annotated[Float, Field(ge=0, lt=1)] = 0.05
    schedule: Schedule = Schedule.COSINE
    weight_decay: Annotated[Float, Field(ge=0, le=1)] = 0.0
    max_gradient_norm: Annotated[Float, Field(gt=0, le=1000)] = 1.0
    eval_steps: Annotated[Int, Field(ge=0)] = 0
    evaluation_rows: Annotated[Int, Field(ge=1)] | None = None
    generations: Annotated[Int, Field(ge=0, le=100)] = 5
    seed: Annotated[Int, Field(ge=0, le=2**31 - 1)] = 42
    ranks: Annotated[Int, Field(ge=1, le=4096)] = 1
    merge_adapter: bool = True
    registered_model_name: Name | None = None
    max_perplexity_ratio: Annotated[Float, Field(gt=0, le=10)] = 1.0

    @model_validator(mode="after")
    def _check_rules(self) -> FineTuneSpec:
        problems = list(_rule_problems(vars(self)))
        if problems:
            raise ValueError("; ".join(map(str, problems)))
        return self

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> FineTuneSpec:
        """Parses what a form, a DAG or a REST call gave.

        Numbers may come as strings; None and the empty string mean "the default".

        Raises:
            SpecError: with every problem of every field.
        """
        if not isinstance(params, Mapping):
            raise SpecError([FieldProblem(field="params", value=params, problem="should be a mapping of fields")])
        values: dict[str, Any] = {}
        problems = list(_unknown_fields(params))
        for field in dataclasses.fields(cls):
            raw = params.get(field.name)
            if _blank(raw):
                if field.name == "model":
                    problems.append(
                        FieldProblem(
                            field="model",
                            value=raw,
                            problem="is required",
                            suggestion="Give a hub id, for example 'HuggingFaceTB/SmolLM2-135M-Instruct'.",
                        )
                    )
                else:
                    values[field.name] = field.default
                continue
            try:
                values[field.name] = _adapter(field.name).validate_python(raw)
            except ValidationError as error:
                problems.append(_field_problem(field.name, raw, error))
        problems.extend(_rule_problems(values))
        if problems:
            raise SpecError(problems)
        return cls(**values)

    def to_params(self) -> dict[str, Any]:
        """JSON-able values that ``from_params`` turns into an equal spec."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def batch(self) -> tuple[int, int, int]:
        """(effective batch size, micro batch size per rank, gradient accumulation steps)."""
        return _batch(self.effective_batch_size, self.micro_batch_size, self.gradient_accumulation_steps, self.ranks)

    @property
    def peak_learning_rate(self) -> float:
        return self.learning_rate if self.learning_rate is not None else DEFAULT_LEARNING_RATE[self.method]

    @property
    def length(self) -> tuple[int | None, float | None]:
        """(steps, epochs), exactly one of them set."""
        return (self.max_steps, None) if self.max_steps is not None else (None, self.epochs or 1.0)


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    # A dictionary of annotations rather than the dataclass: one field at a time reports them all.
    return TypeAdapter(get_type_hints(FineTuneSpec, include_extras=True)[name])


def _unknown_fields(params: Mapping[Any, Any]) -> Iterable[FieldProblem]:
    known = [field.name for field in dataclasses.fields(FineTuneSpec)]
    for name in params:
        if name not in known:
            yield FieldProblem(
                field=str(name),
                value=params[name],
                problem="there is no such field",
                suggestion=did_you_mean(name, known),
            )


_ENUMS: dict[str, type[StrEnum]] = {"method": Method, "precision": Precision, "schedule": Schedule}


def _field_problem(name: str, raw: Any, error: ValidationError) -> FieldProblem:
    if name == "method" and "qlora" in str(raw).lower():
        return FieldProblem(
            field=name,
            value=raw,
            problem="QLoRA (4-bit base weights) is not offered yet",
            suggestion="Use 'lora'.",
        )
    if name in _ENUMS:
        choices = [choice.value for choice in _ENUMS[name]]
        guess = nearest(raw, choices)
        hint = f" Did you mean {guess!r}?" if guess else ""
        return FieldProblem(
            field=name, value=raw, problem=f"should be one of {', '.join(choices)}", suggestion=hint[1:]
        )
    first = error.errors(include_url=False, include_context=False)[0]
    text = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return FieldProblem(field=name, value=raw, problem=text, suggestion=_nearest_bound(name, raw))


def _nearest_bound(name: str, raw: Any) -> str:
    """Names the bound that a number out of bounds has crossed."""
    try:
        number = float(raw)
    except (TypeError, ValueError, OverflowError):
        return ""
    if isinstance(raw, bool) or not math.isfinite(number):
        return ""
    schema = _adapter(name).json_schema()
    bounds = next((option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"), schema)
    # Behind the check for booleans, pydantic names bounds as in Python rather than as in JSON Schema.
    low, high = bounds.get("ge"), bounds.get("le")
    if low is not None and number < low:
        return f"The smallest that works is {low:g}."
    if high is not None and number > high:
        return f"The largest that works is {high}."
    if bounds.get("type") == "integer" and not number.is_integer():
        return f"Nearest: {round(number)}."
    return ""


def _rule_problems(values: Mapping[str, Any]) -> Iterable[FieldProblem]:
    """Rules between fields. A rule whose fields did not parse is silent: they were reported already."""
    for rule in (_length_rule, _lora_rule, _address_rule, _data_rule, _batch_rule):
        try:
            yield from rule(values)
        except KeyError:
            continue


def _length_rule(values: Mapping[str, Any]) -> list[FieldProblem]:
    if values["max_steps"] is None or values["epochs"] is None:
        return []
    return [
        FieldProblem(
            field="epochs",
            value=values["epochs"],
            problem=f"only one of max_steps and epochs can be given, and max_steps is {values['max_steps']}",
            suggestion="Leave one of them empty.",
        )
    ]


def _lora_rule(values: Mapping[str, Any]) -> list[FieldProblem]:
    if values["method"] is not Method.FULL:
        return []
    # A form sends its defaults for hidden choices too, so a default value is no contradiction.
    return [
        FieldProblem(
            field=field.name,
            value=values[field.name],
            problem="has a meaning only with method 'lora', but the method is 'full'",
            suggestion="Leave it empty, or choose method 'lora'.",
        )
        for field in dataclasses.fields(FineTuneSpec)
        if field.name.startswith("lora_") and values.get(field.name, field.default) != field.default
    ]


def _address_rule(values: Mapping[str, Any]) -> list[FieldProblem]:
    return [
        secret_problem(name, "AWS_SECRET_ACCESS_KEY") for name in ("model", "data") if looks_secret("", values[name])
    ]


def _data_rule(values: Mapping[str, Any]) -> list[FieldProblem]:
    data: str = values["data"]
    if looks_secret("", data):
        return []  # told already, without showing it
    name = data.rstrip("/").rpartition("/")[2].lower().removesuffix(".gz")
    if data == DOCSTRINGS or name.endswith(DATA_SUFFIXES) or ("/" in data and "." not in name):
        return []
    meant = nearest(data, [DOCSTRINGS])
    return [
        FieldProblem(
            field="data",
            value=data,
            problem=f"should be '{DOCSTRINGS}', a file that ends with one of {', '.join(DATA_SUFFIXES)}, or a folder",
            suggestion=f"Did you mean {meant!r}?" if meant else "",
        )
    ]


def _batch(effective: int | None, micro: int | None, accumulation: int | None, ranks: int) -> tuple[int, int, int]:
    """Fills the gaps of a batch triple; the product may miss ``effective`` when it cannot be met."""
    if effective is None:
        micro, accumulation = micro or DEFAULT_MICRO_BATCH_SIZE, accumulation or 1
        return micro * accumulation * ranks, micro, accumulation
    per_rank = max(1, effective // ranks)
    if micro is not None:
        return effective, micro, accumulation or max(1, per_rank // micro)
    if accumulation is not None:
        return effective, max(1, per_rank // accumulation), accumulation
    micro = next(size for size in range(min(DEFAULT_MICRO_BATCH_SIZE, per_rank), 0, -1) if per_rank % size == 0)
    return effective, micro, per_rank // micro


def _batch_rule(values: Mapping[str, Any]) -> list[FieldProblem]:
    effective, micro, accumulation = (
        values["effective_batch_size"],
        values["micro_batch_size"],
        values["gradient_accumulation_steps"],
    )
    ranks: int = values["ranks"]
    whole, size, steps = _batch(effective, micro, accumulation, ranks)
    if effective is None or size * steps * ranks == whole:
        return []
    unit = (micro or 1) * (accumulation or 1) * ranks
    if micro is not None and accumulation is not None:
        options = [unit]
    else:
        options = sorted({max(unit, effective // unit * unit), (effective // unit + 1) * unit})
    given = [f"micro batch {micro}"] if micro is not None else []
    given += [f"{accumulation} accumulation steps"] if accumulation is not None else []
    return [
        FieldProblem(
            field="effective_batch_size",
            value=effective,
            problem=f"cannot be met with {' x '.join([*given, f'{ranks} ranks'])}",
            suggestion=f"Nearest that can: {' or '.join(map(str, options))}.",
        )
    ]
