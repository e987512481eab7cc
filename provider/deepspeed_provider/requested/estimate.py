# SPDX-License-Identifier: Apache-2.0
"""One request for an estimate, from the command line or a line of a batch: checked once, all problems at once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from deepspeed_provider.clusters.gpus import Gpu, gpu
from deepspeed_provider.clusters.hardware import INTERCONNECT_GBPS, Hardware
from deepspeed_provider.clusters.throughput import Throughput, throughput
from deepspeed_provider.errors import FieldProblem, SpecError, did_you_mean, tried
from deepspeed_provider.requested.model_source import Model, ModelSource, counted_model
from deepspeed_provider.sizing.estimate import Fit, MemoryEstimate, estimate
from deepspeed_provider.sizing.lora import adapters
from deepspeed_provider.sizing.options import Method, Precision, TrainingOptions, parse_options

HARDWARE_KEYS: Final = ("gpu", "interconnect_gbps")
KEYS: Final = ("model", "parameters", *HARDWARE_KEYS, *TrainingOptions.model_fields)
# Beyond all machines there are; keeps products of options printable.
LARGEST_OPTION: Final = 10**15

_LONG_NUMBER: Final = re.compile(r"\s*[+-]?[\d_]{16,}\s*")


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class OnHardware:
    """How a way to train goes on GPUs that were named."""

    hardware: Hardware
    throughput: Throughput
    fit: Fit


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An estimate, the model that it is of, and how it goes on a GPU where one was named."""

    model: Model
    options: TrainingOptions
    estimate: MemoryEstimate
    on_hardware: OnHardware | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of the estimate, and of training it so on this GPU."""
        warned = self.estimate.warnings
        if self.on_hardware is None:
            return warned
        gpu = self.on_hardware.hardware.gpu
        if self.options.precision in (Precision.BF16, Precision.PURE_BF16) and not gpu.bf16:
            slow = f"{gpu.name} does not compute in bf16: it is emulated, at the speed of fp32. Use precision fp16."
            warned = (*warned, slow)
        return warned


def answer(values: Mapping[str, Any], source: ModelSource) -> Answer:
    """``values``: ``model`` or ``parameters``, and options by their names; None is as if not given.

    Raises :class:`SpecError` with the problems of model and options together.
    """
    given = {name: value for name, value in values.items() if value is not None}
    problems = [_unknown_key(name, value) for name, value in given.items() if name not in KEYS]
    model = tried(lambda: asked_model(given, source), problems)
    options = tried(lambda: asked_options(given), problems)
    named = tried(lambda: _gpu(given), problems)
    interconnect = tried(lambda: _interconnect_gbps(given), problems)
    if model is not None and options is not None and not problems:
        memory = estimate(model.architecture, options)
        on_hardware = None if named is None else _on_hardware(model, options, memory, named, interconnect)
        return Answer(model=model, options=options, estimate=memory, on_hardware=on_hardware)
    if model is not None and options is None:
        # The estimate would find these only once the options are right.
        tried(lambda: _refuse_absent_targets(model, given), problems)
    raise SpecError(problems)


def asked_model(given: Mapping[str, Any], source: ModelSource) -> Model:
    """By ``model`` or ``parameters``. Raises :class:`SpecError`."""
    if "model" in given and "parameters" in given:
        works = "Give a model or a parameter count, not both."
        raise _problem("parameters", given["parameters"], "a model has its own count", works)
    if "parameters" in given:
        return counted_model(given["parameters"])
    if "model" in given:
        return source.model(given["model"])
    works = "Give a name such as 'gpt2', a path of a config.json, or a count of parameters."
    raise _problem("model", None, "is missing", works)


def _gpu(given: Mapping[str, Any]) -> Gpu | None:
    return gpu(str(given["gpu"])) if "gpu" in given else None


def _interconnect_gbps(given: Mapping[str, Any]) -> float | None:
    """Gbit/s of one node to the others."""
    value = given.get("interconnect_gbps")
    if value is None:
        return None
    if "gpu" not in given:
        works = "Name one with gpu, such as A100-80GB."
        raise _problem("interconnect_gbps", value, "says nothing without a GPU", works)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number <= LARGEST_OPTION:
        raise _problem("interconnect_gbps", value, "is no rate in Gbit/s", f"The default is {INTERCONNECT_GBPS}.")
    return number


def _on_hardware(
    model: Model, options: TrainingOptions, memory: MemoryEstimate, named: Gpu, interconnect_gbps: float | None
) -> OnHardware:
    hardware = Hardware.given(
        gpu=named,
        gpus_per_node=options.gpus_per_node,
        nodes=options.nodes,
        interconnect_gbps=interconnect_gbps,
    )
    return OnHardware(
        hardware=hardware,
        throughput=throughput(model.architecture, options, hardware),
        fit=memory.gpu.fits(named.memory_bytes),
    )


def _problem(field: str, value: object, problem: str, suggestion: str) -> SpecError:
    return SpecError([FieldProblem(field=field, value=value, problem=problem, suggestion=suggestion)])


def asked_options(given: Mapping[str, Any]) -> TrainingOptions:
    """By their names. Raises :class:`SpecError`."""
    named = {name: value for name, value in given.items() if name in TrainingOptions.model_fields}
    problems = [
        FieldProblem(
            field=name, value=value, problem="is too large", suggestion=f"Use a number of at most {LARGEST_OPTION}."
        )
        for name, value in named.items()
        if _is_too_large(value)
    ]
    too_large = {problem.field for problem in problems}
    options = tried(
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
    hint = did_you_mean(name.replace("-", "_"), KEYS)
    return FieldProblem(field=name, value=value, problem="there is no such option", suggestion=hint)
