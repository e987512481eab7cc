# SPDX-License-Identifier: Apache-2.0
"""One request for an estimate, from the command line or a line of a batch: checked once, all problems at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.model_source import Model, ModelSource, counted_model
from deepspeed_provider.sizing.estimate import MemoryEstimate, estimate
from deepspeed_provider.sizing.lora import adapters
from deepspeed_provider.sizing.options import Method, TrainingOptions, parse_options

KEYS: Final = ("model", "parameters", *TrainingOptions.model_fields)
# Beyond all machines there are; keeps products of options printable.
LARGEST_OPTION: Final = 10**15

_LONG_NUMBER: Final = re.compile(r"\s*[+-]?[\d_]{16,}\s*")


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An estimate, and the model that it is of."""

    model: Model
    options: TrainingOptions
    estimate: MemoryEstimate


def answer(values: Mapping[str, Any], source: ModelSource) -> Answer:
    """``values``: ``model`` or ``parameters``, and options by their names; None is as if not given.

    Raises :class:`SpecError` with the problems of model and options together.
    """
    given = {name: value for name, value in values.items() if value is not None}
    problems = [_unknown_key(name, value) for name, value in given.items() if name not in KEYS]
    model = _tried(lambda: _model(given, source), problems)
    options = _tried(lambda: _options(given), problems)
    if model is not None and options is not None and not problems:
        return Answer(model=model, options=options, estimate=estimate(model.architecture, options))
    if model is not None and options is None:
        # The estimate would find these only once the options are right.
        _tried(lambda: _refuse_absent_targets(model, given), problems)
    raise SpecError(problems)


def _tried(make: Callable[[], T], problems: list[FieldProblem]) -> T | None:
    try:
        return make()
    except SpecError as error:
        problems += [problem for problem in error.problems if problem not in problems]
        return None


def _model(given: Mapping[str, Any], source: ModelSource) -> Model:
    if "model" in given and "parameters" in given:
        raise SpecError(
            [
                FieldProblem(
                    field="parameters",
                    value=given["parameters"],
                    problem="a model has its own count",
                    suggestion="Give a model or a parameter count, not both.",
                )
            ]
        )
    if "parameters" in given:
        return counted_model(given["parameters"])
    if "model" in given:
        return source.model(given["model"])
    raise SpecError(
        [
            FieldProblem(
                field="model",
                value=None,
                problem="is missing",
                suggestion="Give a name such as 'gpt2', a path of a config.json, or a count of parameters.",
            )
        ]
    )


def _options(given: Mapping[str, Any]) -> TrainingOptions:
    named = {name: value for name, value in given.items() if name in TrainingOptions.model_fields}
    problems = [
        FieldProblem(
            field=name, value=value, problem="is too large", suggestion=f"Use a number of at most {LARGEST_OPTION}."
        )
        for name, value in named.items()
        if _is_too_large(value)
    ]
    too_large = {problem.field for problem in problems}
    options = _tried(
        lambda: parse_options({name: value for name, value in named.items() if name not in too_large}), problems
    )
    if problems or options is None:
        raise SpecError(problems)
    return options


def _is_too_large(value: object) -> bool:
    if isinstance(value, str) and _LONG_NUMBER.fullmatch(value):
        return True
    return isinstance(value, int | float) and LARGEST_OPTION < abs(value) < float("inf")


def _refuse_absent_targets(model: Model, given: Mapping[str, Any]) -> None:
    targets = given.get("lora_targets")
    if isinstance(targets, str) and targets.strip(", ") and given.get("method") in (Method.LORA, Method.QLORA):
        adapters(model.architecture, rank=1, targets=targets)


def _unknown_key(name: str, value: object) -> FieldProblem:
    near = difflib.get_close_matches(name.replace("-", "_").lower(), KEYS, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known are {', '.join(KEYS)}."
    return FieldProblem(field=name, value=value, problem="there is no such option", suggestion=hint)
