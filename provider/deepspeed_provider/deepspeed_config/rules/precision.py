# SPDX-License-Identifier: Apache-2.0
"""fp16, bf16 and fp32: contradictions, loss scaling, hardware."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, Final

from deepspeed_provider.deepspeed_config.findings import Facts, Found, Severity
from deepspeed_provider.deepspeed_config.rules.rule import Example, Rule, config, zero
from deepspeed_provider.deepspeed_config.schema import schema
from deepspeed_provider.deepspeed_config.subject import AUTO, Subject

# DeepSpeed's names of a type (runtime/config.py, DtypeEnum), and those of communication (get_communication_data_type).
_DTYPES: Final = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}
_COMMUNICATION: Final = ("communication_data_type", "seq_parallel_communication_data_type")
_DATA_TYPES: Final = ("data_types.grad_accum_dtype", "data_types.param_dtype", "data_types.buffer_dtype")
_ALL_BF16: Final = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
# Names under which people ask for a precision, DeepSpeed's own among them.
LIKE_A_PRECISION: Final = re.compile(r"(fp|bf|tf|float|bfloat|int|nf|mxfp|nvfp)\d+|half|mixed_precision|dtype")
_LOSS_SCALING: Final = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
_DYNAMIC: Final = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def _both(subject: Subject) -> Iterable[Found]:
    if subject.on("fp16.enabled") and subject.on(f"{subject.bf16}.enabled"):
        hint = "Keep bf16 on GPUs since Ampere, fp16 on older ones."
        yield Found(path="fp16.enabled", value=True, problem="bf16 is enabled too.", suggestion=hint)


def _old_name(subject: Subject) -> Iterable[Found]:
    if subject.config.get("bfloat16") is None:
        return
    if subject.config.get("bf16") is not None:
        text = "is ignored, since 'bf16' is there."
    else:
        text = "is the old name of 'bf16'."
    yield Found(path="bfloat16", value=subject.config["bfloat16"], problem=text, suggestion="Use 'bf16' alone.")


def _scaling_without_fp16(subject: Subject) -> Iterable[Found]:
    if subject.on("fp16.enabled") or subject.written("fp16.enabled") == AUTO:
        return
    for name, value in subject.section("fp16").items():
        if name in _LOSS_SCALING:
            text = f"has no effect: fp16 is off, and {subject.precision} needs no loss scaling."
            yield Found(path=f"fp16.{name}", value=value, problem=text, suggestion="Remove it.")


def _static_scale(subject: Subject) -> Iterable[Found]:
    scale = subject.number("fp16.loss_scale")
    if not subject.on("fp16.enabled") or not scale:
        return
    for name, value in subject.section("fp16").items():
        if name in _DYNAMIC:
            text = f"has no effect: a loss_scale of {scale:g} is static."
            hint = "Use loss_scale 0 for dynamic scaling, or remove this key."
            yield Found(path=f"fp16.{name}", value=value, problem=text, suggestion=hint)


def _impossible_scale(subject: Subject) -> Iterable[Found]:
    section = subject.section("fp16")
    scale = section.get("loss_scale", 0)
    if scale != AUTO and not _is_scale(scale):
        hint = "Use 0, which scales dynamically."
        yield Found(path="fp16.loss_scale", value=scale, problem="should be a number, 0 or more.", suggestion=hint)
    dynamic = subject.on("fp16.enabled") and scale in (0, "0", AUTO)
    for name, default in (("loss_scale_window", 1000), ("min_loss_scale", 1)):
        value = section.get(name, default)
        if value != AUTO and not _is_limit(value, dynamic):
            hint = f"DeepSpeed's default is {default}."
            yield Found(path=f"fp16.{name}", value=value, problem="should be a whole number above 0.", suggestion=hint)


def _is_scale(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value)) and float(value) >= 0
    except (TypeError, ValueError):
        return False


def _is_limit(value: Any, dynamic: bool) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value)) and (not dynamic or float(value) > 0)
    except (TypeError, ValueError):
        return False


def _no_bf16(subject: Subject) -> Iterable[Found]:
    if subject.facts.bf16 is False and subject.precision == "bf16":
        hint = "Use fp16 with loss_scale 0, or GPUs since Ampere (A10, A100, H100)."
        text = "these GPUs have no bfloat16 arithmetic."
        yield Found(path=f"{subject.bf16}.enabled", value=True, problem=text, suggestion=hint)


def _fp16_on_cpu(subject: Subject) -> Iterable[Found]:
    if subject.facts.use_gpu is False and subject.precision == "fp16":
        text = "few CPUs have fp16 arithmetic; DeepSpeed refuses fp16 on all others."
        yield Found(path="fp16.enabled", value=True, problem=text, suggestion="Use bf16 or fp32.")


def _fp16_for_bf16_model(subject: Subject) -> Iterable[Found]:
    if subject.facts.model_precision == "bf16" and subject.precision == "fp16":
        text = "the model was trained in bf16: activations beyond 65504 overflow in fp16, and the loss becomes NaN."
        hint = "Use bf16, or fp32 where the GPUs have none."
        yield Found(path="fp16.enabled", value=True, problem=text, suggestion=hint)


def _master_weights(subject: Subject) -> Iterable[Found]:
    switches = (
        "fp16.fp16_master_weights_and_grads",
        f"{subject.bf16}.bf16_master_weights_and_grads",
        f"{subject.bf16}.bf16_optimizer_states",
    )
    for path in switches:
        if subject.on(path) and subject.stage == 0:
            hint = "Use zero_optimization.stage 1, 2 or 3."
            yield Found(path=path, value=True, problem="works only with ZeRO.", suggestion=hint)
    states, master = switches[2], switches[1]
    if subject.on(states) and not subject.on(master):
        text = "needs bf16_master_weights_and_grads."
        yield Found(path=states, value=True, problem=text, suggestion="Enable both, or none.")


def _master_weights_on_gpu(subject: Subject) -> Iterable[Found]:
    """bf16 master weights stay on the GPU where the states are bf16 too."""
    bf16 = subject.bf16
    on_gpu = subject.device("offload_optimizer") == "none" and subject.stage > 0
    switches = {
        "fp16.fp16_master_weights_and_grads": "Offload the optimizer to the CPU.",
        f"{bf16}.bf16_master_weights_and_grads": "Offload the optimizer, or enable bf16_optimizer_states too.",
    }
    for path, hint in switches.items():
        states = path.startswith(bf16) and subject.on(f"{bf16}.bf16_optimizer_states")
        if on_gpu and subject.on(path) and not states:
            text = "needs an optimizer that is offloaded to DeepSpeed's CPU Adam."
            yield Found(path=path, value=True, problem=text, suggestion=hint)


def _names(subject: Subject) -> Iterable[Found]:
    for path in (*_COMMUNICATION, *_DATA_TYPES, "torch_autocast.dtype"):
        value = subject.written(path)
        names = tuple(_DTYPES) if path in _COMMUNICATION else tuple(name for all_ in _DTYPES.values() for name in all_)
        text = value.lower() if path in _COMMUNICATION and isinstance(value, str) else value
        if value is not None and value != AUTO and text not in names:
            yield Found(path=path, value=value, problem="is no type that DeepSpeed knows.", suggestion=_USE_ONE)


_USE_ONE: Final = "Use fp32, bf16 or fp16."


def _other_precision(subject: Subject) -> Iterable[Found]:
    """Types that must be the model's: of parameters always, of accumulated gradients without ZeRO."""
    precision = subject.precision
    for name in ("param_dtype", *(("grad_accum_dtype",) if subject.stage == 0 else ())):
        value = subject.written(f"data_types.{name}")
        known = any(value in names for names in _DTYPES.values())
        if known and value not in _DTYPES[precision]:
            text = f"is not the precision of the training, {precision}."
            hint = f"Use {precision}, or leave it out."
            yield Found(path=f"data_types.{name}", value=value, problem=text, suggestion=hint)


def _unknown_precision(subject: Subject) -> Iterable[Found]:
    for name, value in subject.config.items():
        is_known = str(name) in schema().sections[""].fields
        if LIKE_A_PRECISION.fullmatch(str(name)) and not is_known and value not in (False, None, {}):
            text = f"DeepSpeed knows no such precision, ignores it, and trains in {subject.precision}."
            yield Found(path=str(name), value=value, problem=text, suggestion="Use 'bf16' or 'fp16'.")


RULES: Final = (
    Rule(
        name="two-precisions",
        severity=Severity.ERROR,
        why="DeepSpeed refuses fp16 and bf16 together.",
        find=_both,
        accepted=Example(config(bf16={"enabled": True}, fp16={"enabled": False})),
        refused=Example(config(bf16={"enabled": True}, fp16={"enabled": True})),
    ),
    Rule(
        name="unknown-precision",
        severity=Severity.ERROR,
        why="A section such as 'fp8' is silently ignored.",
        find=_unknown_precision,
        accepted=Example(config(fp16={"enabled": True})),
        refused=Example(config(fp8={"enabled": True})),
    ),
    Rule(
        name="old-bf16-name",
        severity=Severity.WARNING,
        why="DeepSpeed reads 'bfloat16' only where 'bf16' is absent.",
        find=_old_name,
        accepted=Example(config(bf16={"enabled": True})),
        refused=Example(config(bfloat16={"enabled": True})),
    ),
    Rule(
        name="loss-scaling-without-fp16",
        severity=Severity.WARNING,
        why="Only fp16 scales the loss.",
        find=_scaling_without_fp16,
        accepted=Example(config(fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 16})),
        refused=Example(config(bf16={"enabled": True}, fp16={"enabled": False, "loss_scale": 0})),
    ),
    Rule(
        name="static-loss-scale",
        severity=Severity.WARNING,
        why="With a loss_scale other than 0 the fields of dynamic scaling are not used.",
        find=_static_scale,
        accepted=Example(config(fp16={"enabled": True, "loss_scale": 128})),
        refused=Example(config(fp16={"enabled": True, "loss_scale": 128, "initial_scale_power": 16})),
    ),
    Rule(
        name="impossible-loss-scale",
        severity=Severity.ERROR,
        why="DeepSpeed refuses a scale below 0, and dynamic scaling without a window or a floor.",
        find=_impossible_scale,
        accepted=Example(config(fp16={"enabled": True, "loss_scale": 0, "loss_scale_window": 1000})),
        refused=Example(config(fp16={"enabled": True, "loss_scale": 0, "loss_scale_window": 0})),
    ),
    Rule(
        name="no-bf16-hardware",
        severity=Severity.ERROR,
        why="DeepSpeed refuses bf16 on GPUs without it (V100, T4).",
        find=_no_bf16,
        accepted=Example(config(fp16={"enabled": True}), Facts(bf16=False)),
        refused=Example(config(bf16={"enabled": True}), Facts(bf16=False)),
    ),
    Rule(
        name="fp16-on-cpu",
        severity=Severity.ERROR,
        why="DeepSpeed's CPU accelerator refuses fp16 without fp16 instructions.",
        find=_fp16_on_cpu,
        accepted=Example(config(bf16={"enabled": True}), Facts(use_gpu=False)),
        refused=Example(config(fp16={"enabled": True}), Facts(use_gpu=False)),
    ),
    Rule(
        name="fp16-for-bf16-model",
        severity=Severity.WARNING,
        why="Activations of models trained in bf16 can exceed the range of fp16.",
        find=_fp16_for_bf16_model,
        accepted=Example(config(bf16={"enabled": True}), Facts(model_precision="bf16")),
        refused=Example(config(fp16={"enabled": True}), Facts(model_precision="bf16")),
    ),
    Rule(
        name="master-weights-without-zero",
        severity=Severity.ERROR,
        why="Low-precision master weights and states exist in ZeRO's optimizers only.",
        find=_master_weights,
        accepted=Example(zero(2) | {"bf16": {"enabled": True, **_ALL_BF16}}),
        refused=Example(zero(0) | {"bf16": {"enabled": True, **_ALL_BF16}}),
    ),
    Rule(
        name="master-weights-without-offload",
        severity=Severity.ERROR,
        why="Low-precision master weights with fp32 states exist in the offloaded CPU Adam only.",
        find=_master_weights_on_gpu,
        accepted=Example(zero(2) | {"bf16": {"enabled": True, **_ALL_BF16}}),
        refused=Example(zero(2) | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
    ),
    Rule(
        name="unknown-dtype",
        severity=Severity.ERROR,
        why="DeepSpeed refuses other names of types.",
        find=_names,
        accepted=Example(config(communication_data_type="bf16")),
        refused=Example(config(communication_data_type="int4")),
    ),
    Rule(
        name="other-precision",
        severity=Severity.ERROR,
        why="DeepSpeed refuses parameters, and without ZeRO accumulated gradients, in another precision.",
        find=_other_precision,
        accepted=Example(config(bf16={"enabled": True}, data_types={"param_dtype": "bf16"})),
        refused=Example(config(bf16={"enabled": True}, data_types={"param_dtype": "fp16"})),
    ),
)
