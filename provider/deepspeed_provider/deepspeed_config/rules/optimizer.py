# SPDX-License-Identifier: Apache-2.0
"""Optimizer, learning-rate schedule, clipping, and what else stands in the file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from deepspeed_provider.deepspeed_config.findings import Found, Severity
from deepspeed_provider.deepspeed_config.rules.rule import Example, Rule, config, zero
from deepspeed_provider.deepspeed_config.schema import schema
from deepspeed_provider.deepspeed_config.subject import AUTO, Subject
from deepspeed_provider.errors import did_you_mean

# Taken by DeepSpeed itself before it calls the constructor (engine.py, get_optimizer_configuration).
_OWN_PARAMETERS: Final = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
_ADAM: Final = ("adam", "adamw")
_CLIPPING: Final = "gradient_clipping"
# Of all optimizers that take them, with what is usual.
_NUMBERS: Final = {"lr": "1e-5", "weight_decay": "0.01", "momentum": "0.9"}


def _optimizer(name: str, **params: Any) -> dict[str, Any]:
    """For examples."""
    return config(optimizer={"type": name, "params": {"lr": 1e-5, **params}})


def _scheduler(name: str, **params: Any) -> dict[str, Any]:
    """For examples."""
    return config(scheduler={"type": name, "params": params})


def _unknown_types(subject: Subject) -> Iterable[Found]:
    known = {"optimizer": tuple(schema().optimizers), "scheduler": tuple(schema().schedulers)}
    for section, names in known.items():
        if not subject.section(section):
            continue
        name = subject.written(f"{section}.type")
        wanted = subject.optimizer if section == "optimizer" else name
        if name is None:
            text = f"is missing, so DeepSpeed ignores the {section}."
            yield Found(path=f"{section}.type", value=None, problem=text, suggestion=_EXAMPLES[section])
        elif wanted not in names and name != AUTO:
            text = f"DeepSpeed knows no such {section}."
            yield Found(path=f"{section}.type", value=name, problem=text, suggestion=did_you_mean(name, sorted(names)))


_EXAMPLES: Final = {"optimizer": "Add 'AdamW'.", "scheduler": "Add 'WarmupCosineLR'."}


def _params(subject: Subject, section: str) -> Mapping[str, Any]:
    return subject.section(f"{section}.params")


def _device(subject: Subject) -> str:
    """For which device DeepSpeed constructs the optimizer."""
    if subject.on_torch:
        return "torch"
    return "cpu" if subject.device("offload_optimizer") != "none" and subject.stage > 0 else "gpu"


def _foreign_params(subject: Subject) -> Iterable[Found]:
    name = subject.optimizer
    known = schema().optimizers.get(name) if name is not None else None
    if known is None or not known.parameters:
        return
    device = _device(subject)
    taken = known.parameters.get(device) or next(iter(known.parameters.values()))
    own = (*_OWN_PARAMETERS, *taken) if name in _ADAM else taken
    for key, value in _params(subject, "optimizer").items():
        if key not in own and key != "max_grad_norm":
            text = f"{subject.written('optimizer.type')} takes no such parameter on this device ({device})."
            yield Found(
                path=f"optimizer.params.{key}", value=value, problem=text, suggestion=did_you_mean(key, sorted(own))
            )


def _values(subject: Subject) -> Iterable[Found]:
    for section in ("optimizer", "scheduler"):
        for name, value in _params(subject, section).items():
            path = f"{section}.params.{name}"
            if value == AUTO:
                continue
            if isinstance(value, str) and _reads_as_number(value):
                text = "is text, on which the constructor or the first step fails."
                hint = f"Write the number without quotes: {value.strip()}."
                yield Found(path=path, value=value, problem=text, suggestion=hint)
            elif section == "optimizer" and name in _NUMBERS and not _is_at_least_0(value):
                text = "should be a number from 0."
                yield Found(path=path, value=value, problem=text, suggestion=f"Write {_NUMBERS[name]}.")
            elif section == "optimizer" and name == "betas" and not _are_betas(value):
                text = "should be two numbers, each from 0 to below 1."
                yield Found(path=path, value=value, problem=text, suggestion="Write [0.9, 0.999].")


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_at_least_0(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _are_betas(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_is_at_least_0(one) and one < 1 for one in value)


def _clipping_in_optimizer(subject: Subject) -> Iterable[Found]:
    value = _params(subject, "optimizer").get("max_grad_norm")
    if value is not None:
        text = "DeepSpeed refuses it as an optimizer's parameter."
        path = "optimizer.params.max_grad_norm"
        yield Found(path=path, value=value, problem=text, suggestion=f"Write {_CLIPPING} {value} at the top level.")


def _no_rate(subject: Subject) -> Iterable[Found]:
    if subject.optimizer is not None and "lr" not in _params(subject, "optimizer"):
        text = "is missing: the optimizer takes its own default, 1e-3 for most, 100 times a usual fine-tune's."
        path = "optimizer.params.lr"
        yield Found(path=path, value=None, problem=text, suggestion="Write it, such as 1e-5, or 2e-4 with LoRA.")


def _untested(subject: Subject) -> Iterable[Found]:
    name = subject.optimizer
    known = schema().optimizers.get(name) if name is not None else None
    if known is None or known.tested or subject.stage == 0 or subject.on("zero_allow_untested_optimizer"):
        return
    text = "is not among the optimizers that DeepSpeed has tested with ZeRO; it refuses others."
    hint = 'Use AdamW, or set "zero_allow_untested_optimizer" to true.'
    yield Found(path="optimizer.type", value=subject.written("optimizer.type"), problem=text, suggestion=hint)


def _scheduler_params(subject: Subject) -> Iterable[Found]:
    name = subject.written("scheduler.type")
    known = schema().schedulers.get(name) if isinstance(name, str) else None
    if known is None:
        return
    given = _params(subject, "scheduler")
    for key, required in known.items():
        if required and key not in given:
            path = f"scheduler.params.{key}"
            yield Found(path=path, value=None, problem=f"{name} needs it.", suggestion="Add it.")
    for key, value in given.items():
        if key not in known:
            text = f"{name} takes no such parameter."
            yield Found(
                path=f"scheduler.params.{key}", value=value, problem=text, suggestion=did_you_mean(key, sorted(known))
            )


def _warmup(subject: Subject) -> Iterable[Found]:
    given = _params(subject, "scheduler")
    steps, total = given.get("warmup_num_steps", AUTO), given.get("total_num_steps", AUTO)
    path = "scheduler.params.warmup_num_steps"
    if steps != AUTO and (isinstance(steps, bool) or not isinstance(steps, int) or steps <= 0):
        text = "should be a whole number above 0."
        yield Found(path=path, value=steps, problem=text, suggestion="Use 1 for no warm-up.")
    elif isinstance(steps, int) and isinstance(total, int) and steps > total:
        text = f"is more than total_num_steps, {total}."
        yield Found(path=path, value=steps, problem=text, suggestion=f"Use {max(1, total // 10)}.")


def _negative_clipping(subject: Subject) -> Iterable[Found]:
    value = subject.number(_CLIPPING)
    if value is not None and value < 0:
        text = "turns clipping off, as 0 does."
        yield Found(path=_CLIPPING, value=value, problem=text, suggestion="Use 1.0.")


def _checkpoint(subject: Subject) -> Iterable[Found]:
    path = "checkpoint.tag_validation"
    value = subject.get(path)
    if not isinstance(value, str) or value.upper() not in ("WARN", "IGNORE", "FAIL"):
        text = "is not Warn, Ignore or Fail."
        yield Found(path=path, value=value, problem=text, suggestion="Use 'Warn'.")


def _checkpointing(subject: Subject) -> Iterable[Found]:
    path = "activation_checkpointing"
    fields = schema().sections[path].fields
    if any(subject.get(f"{path}.{name}") not in (None, field.default) for name, field in fields.items()):
        text = "has an effect only in models that call deepspeed.checkpointing; Hugging Face's do not."
        hint = "Remove it, and use the model's gradient checkpointing."
        yield Found(path=path, value=subject.config[path], problem=text, suggestion=hint)


def _secrets(subject: Subject) -> Iterable[Found]:
    path = "comet.api_key"
    if subject.written(path):
        text = "a secret does not belong into a configuration, which is logged and stored."
        hint = "Give it as the environment variable COMET_API_KEY."
        yield Found(path=path, value=subject.written(path), problem=text, suggestion=hint)


RULES: Final = (
    Rule(
        name="unknown-type",
        severity=Severity.ERROR,
        why="DeepSpeed takes its own optimizers and schedulers, and torch's, by name.",
        find=_unknown_types,
        accepted=Example(_optimizer("AdamW")),
        refused=Example(_optimizer("AdamWW")),
    ),
    Rule(
        name="optimizer-parameter",
        severity=Severity.ERROR,
        why="The params go to a constructor, which refuses others; with CPU offload it is another one.",
        find=_foreign_params,
        accepted=Example(_optimizer("AdamW", betas=[0.9, 0.95])),
        refused=Example(_optimizer("AdamW", beta=[0.9, 0.95])),
    ),
    Rule(
        name="optimizer-value",
        severity=Severity.ERROR,
        why="The params go to a constructor as they are, and are computed with: text is no number, betas are two.",
        find=_values,
        accepted=Example(_optimizer("AdamW", betas=[0.9, 0.95], weight_decay=0)),
        refused=Example(_optimizer("AdamW", betas=[0.9], weight_decay="0.01")),
    ),
    Rule(
        name="clipping-in-optimizer",
        severity=Severity.ERROR,
        why="DeepSpeed clips itself, and refuses max_grad_norm there.",
        find=_clipping_in_optimizer,
        accepted=Example(_optimizer("AdamW") | {_CLIPPING: 1.0}),
        refused=Example(_optimizer("AdamW", max_grad_norm=1.0)),
    ),
    Rule(
        name="no-learning-rate",
        severity=Severity.WARNING,
        why="The default rate of most optimizers ruins a trained model.",
        find=_no_rate,
        accepted=Example(_optimizer("AdamW")),
        refused=Example(config(optimizer={"type": "AdamW"})),
    ),
    Rule(
        name="untested-optimizer",
        severity=Severity.ERROR,
        why="With ZeRO the engine refuses other optimizers unless it is told to allow them.",
        find=_untested,
        accepted=Example(zero(2) | _optimizer("SGD") | {"zero_allow_untested_optimizer": True}),
        refused=Example(zero(2) | _optimizer("SGD")),
    ),
    Rule(
        name="scheduler-parameter",
        severity=Severity.ERROR,
        why="The params go to a constructor, which refuses others and needs some.",
        find=_scheduler_params,
        accepted=Example(_scheduler("WarmupDecayLR", total_num_steps=1000)),
        refused=Example(_scheduler("WarmupDecayLR", warmup_num_steps=100)),
    ),
    Rule(
        name="warmup-steps",
        severity=Severity.ERROR,
        why="DeepSpeed refuses a warm-up of no steps; one longer than the run never reaches the learning rate.",
        find=_warmup,
        accepted=Example(_scheduler("WarmupCosineLR", total_num_steps=1000, warmup_num_steps=50)),
        refused=Example(_scheduler("WarmupCosineLR", total_num_steps=1000, warmup_num_steps=0)),
    ),
    Rule(
        name="negative-clipping",
        severity=Severity.WARNING,
        why="DeepSpeed clips to positive norms only.",
        find=_negative_clipping,
        accepted=Example({**config(), _CLIPPING: 0.0}),
        refused=Example({**config(), _CLIPPING: -1.0}),
    ),
    Rule(
        name="tag-validation",
        severity=Severity.ERROR,
        why="DeepSpeed refuses other modes.",
        find=_checkpoint,
        accepted=Example(config(checkpoint={"tag_validation": "Ignore"})),
        refused=Example(config(checkpoint={"tag_validation": "Maybe"})),
    ),
    Rule(
        name="activation-checkpointing",
        severity=Severity.WARNING,
        why="Checkpointing is the model's own; this section configures DeepSpeed's, which transformers does not use.",
        find=_checkpointing,
        accepted=Example(config(activation_checkpointing={"partition_activations": False})),
        refused=Example(config(activation_checkpointing={"partition_activations": True})),
    ),
    Rule(
        name="secret-in-configuration",
        severity=Severity.ERROR,
        why="Secrets stay out of payloads, logs and files.",
        find=_secrets,
        accepted=Example(config(comet={"enabled": True, "project": "fine-tunes"})),
        refused=Example(config(comet={"enabled": True, "api_key": "abc"})),
    ),
)
