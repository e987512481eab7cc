# SPDX-License-Identifier: Apache-2.0
"""A fine-tune with settings that were decided elsewhere: by a plan that somebody approved, or by the user.

They are used as they are, or refused before anything is submitted; pure, no I/O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from deepspeed_provider.deepspeed_config.check import check
from deepspeed_provider.deepspeed_config.findings import Facts, Finding, Severity
from deepspeed_provider.deepspeed_config.subject import Subject
from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.handed_plan import HandedPlan, field_problem, read_object, read_plan
from deepspeed_provider.planning import Hardware, Plan, plan
from deepspeed_provider.sizing.options import Method, Optimizer
from deepspeed_provider.spec import FineTuneSpec

# How DeepSpeed names the batch, and how a spec does.
BATCH_NAMES: Final = {
    "train_batch_size": "effective_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
# Warnings of the checker that the training cannot let pass: it reads the usual names and types only, and what it
# receives is stored where people look.
REFUSED_WARNINGS: Final = ("deprecated-key", "old-bf16-name", "loose-type", "secret-in-configuration")


def plan_with_gpu_plan(spec: FineTuneSpec, hardware: Hardware, given: object) -> Plan:
    """The plan that takes precision, ZeRO stage, offload, batch and checkpointing from a plan of a cluster.

    ``given``: what ``GpuPlanOperator`` returns, or what ``deepspeed-provider plan --json`` prints, for hardware that is
    there (``--gpu``) as well; as an object or as JSON text. Training's own choices (length, learning
    rate, gradient clipping) stay the spec's.

    Raises:
        SpecError: for what is no plan, is one of another training, or of other hardware than there is.
    """
    asked = read_plan(given)
    problems = [*_other_training(spec, asked), *_other_hardware(hardware, asked)]
    if problems:
        raise SpecError(problems)
    config = {**asked.deepspeed_config, "gradient_clipping": spec.max_gradient_norm}
    # The plan's batch, whatever the spec would have split it into.
    unsplit = dataclasses.replace(spec, micro_batch_size=None, gradient_accumulation_steps=None)
    checkpointing = {"gradient_checkpointing": asked.chosen.settings.gradient_checkpointing}
    reason = f"Settings of the plan for {asked.model} on {asked.chosen}, which was handed over."
    return _planned(unsplit, hardware, config, "plan.deepspeed_config", checkpointing, reason)


def plan_with_config(spec: FineTuneSpec, hardware: Hardware, given: object) -> Plan:
    """The plan that takes precision, ZeRO stage, offload and batch from a DeepSpeed configuration of the user's own.

    ``given``: a mapping, or JSON text. What it does not say about the batch and clipping is the spec's.

    Raises:
        SpecError: with all errors that the checker finds, or where spec and configuration contradict each other.
    """
    content = read_object(given, "deepspeed_config", "Give DeepSpeed's configuration as a mapping.")
    config = {"gradient_clipping": spec.max_gradient_norm, **content}
    if not set(BATCH_NAMES) & set(content):
        config |= dict(zip(BATCH_NAMES, spec.batch, strict=True))
    reason = "Settings of the DeepSpeed configuration that was given."
    return _planned(spec, hardware, config, "deepspeed_config", {}, reason)


def _planned(
    spec: FineTuneSpec,
    hardware: Hardware,
    config: dict[str, Any],
    field: str,
    others: Mapping[str, Any],
    reason: str,
) -> Plan:
    subject = Subject(config, Facts())
    findings = _findings(spec, hardware, config)
    problems = [_of(finding, field) for finding in findings if _is_refused(finding)]
    problems += _contradictions(spec, subject, field)
    if problems:
        raise SpecError(problems)
    batch = {ours: subject.written(theirs) for theirs, ours in BATCH_NAMES.items()}
    found = plan(
        FineTuneSpec.from_params(
            {
                **spec.to_params(),
                **{name: value for name, value in batch.items() if value is not None},
                "precision": subject.precision,
                "zero_stage": subject.stage,
                **others,
            }
        ),
        hardware,
    )
    return dataclasses.replace(
        found,
        # The training takes a section to be an object, where there is one.
        deepspeed_config={name: value for name, value in config.items() if value is not None},
        reasons=(reason, *found.reasons, *map(str, findings)),
    )


def _findings(spec: FineTuneSpec, hardware: Hardware, config: Mapping[str, Any]) -> list[Finding]:
    facts = Facts(
        world_size=spec.ranks,
        method=Method(spec.method.value),
        use_gpu=hardware.use_gpu,
        bf16=hardware.bf16 if hardware.use_gpu else None,
    )
    return check(config, facts)


def _is_refused(finding: Finding) -> bool:
    return finding.severity is Severity.ERROR or finding.rule in REFUSED_WARNINGS


def _of(finding: Finding, field: str) -> FieldProblem:
    return FieldProblem(
        field=f"{field}.{finding.path}" if finding.path else field,
        value=finding.value,
        problem=finding.problem.rstrip("."),
        suggestion=finding.suggestion,
    )


def _contradictions(spec: FineTuneSpec, subject: Subject, field: str) -> list[FieldProblem]:
    return [
        FieldProblem(
            field=f"{field}.{theirs}",
            value=subject.written(theirs),
            problem=f"contradicts the spec, whose {ours} is {asked}",
            suggestion=f"Leave {ours} out, or use {asked}.",
        )
        for theirs, ours in BATCH_NAMES.items()
        if (asked := getattr(spec, ours)) is not None and subject.written(theirs) not in (None, asked)
    ]


def _other_training(spec: FineTuneSpec, asked: HandedPlan) -> list[FieldProblem]:
    """Whatever would need more memory than was planned, or train something else."""
    method, length, batch = spec.method.value, spec.sequence_length, spec.effective_batch_size
    problems = []
    if method != asked.method:
        text = f"the plan is for {asked.method}"
        problems.append(field_problem("method", method, text, f"Use it, or plan with method {method!r}."))
    elif asked.lora_rank is not None and spec.lora_rank > asked.lora_rank:
        text = f"the plan is for adapters of rank {asked.lora_rank}"
        works = f"Use at most {asked.lora_rank}, or plan with lora_rank {spec.lora_rank}."
        problems.append(field_problem("lora_rank", spec.lora_rank, text, works))
    if asked.optimizer != Optimizer.ADAMW.value:
        text = f"the plan is for {asked.optimizer}, and this training steps with AdamW, whose states differ"
        problems.append(field_problem("optimizer", asked.optimizer, text, "Plan with optimizer 'adamw'."))
    if length > asked.sequence_length:
        text = f"the plan is for sequences of {asked.sequence_length} tokens"
        works = f"Use at most {asked.sequence_length}, or plan with sequence_length {length}."
        problems.append(field_problem("sequence_length", length, text, works))
    if batch not in (None, asked.effective_batch_size):
        text = f"the plan is for {asked.effective_batch_size} sequences a step"
        works = f"Leave it out, or plan with effective_batch_size {batch}."
        problems.append(field_problem("effective_batch_size", batch, text, works))
    return problems


def _other_hardware(hardware: Hardware, asked: HandedPlan) -> list[FieldProblem]:
    wanted = asked.hardware
    found = (hardware.nodes, hardware.gpus_per_node, hardware.use_gpu)
    if found == (wanted.nodes, wanted.gpus_per_node, wanted.use_gpu):
        return []
    text = f"is for {wanted}, but the connection's hardware is {hardware}"
    works = (
        f"On such a cluster give the spec ranks {wanted.ranks}, and the operator nodes={wanted.nodes} and "
        "use_gpu=True; without a plan, settings follow the hardware that is there."
    )
    return [field_problem("plan", str(asked.chosen), text, works)]
