# SPDX-License-Identifier: Apache-2.0
"""From what a user asks for to what will run: pure, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepspeed_provider.deepspeed_config.generate import BatchTriple, EngineSettings, deepspeed_config
from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.spec import FineTuneSpec, Method, Precision
from deepspeed_provider.training.plan import (
    EvaluationSettings,
    MethodSettings,
    ModelSettings,
    OptimizationSettings,
    TrackingSettings,
    TrainingPlan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machines that the ranks will find.

    Attributes:
        nodes: machines.
        gpus_per_node: ranks on each machine; on CPU the name is the distributor's own for processes.
        use_gpu: False trains on CPU with the gloo back end.
        bf16: whether the GPUs compute in bfloat16 (Ampere and later).
        cores: CPU cores of one machine, where known.
        host_bytes: memory of one machine, where known.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    use_gpu: bool = True
    bf16: bool = True
    cores: int | None = None
    host_bytes: int | None = None

    @property
    def ranks(self) -> int:
        """World size."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        device = "GPU" if self.use_gpu else "CPU process"
        cores = f", {self.cores} cores" if self.cores else ""
        memory = f", {self.host_bytes / 2**30:.0f} GiB of memory" if self.host_bytes else ""
        machines = "1 machine" if self.nodes == 1 else f"{self.nodes} machines"
        plural = "es" if device.endswith("s") else "s"
        return f"{machines} with {self.gpus_per_node} {device}{plural if self.gpus_per_node > 1 else ''}{cores}{memory}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run, and why."""

    spec: FineTuneSpec
    hardware: Hardware
    precision: Precision
    zero_stage: int
    batch: BatchTriple
    deepspeed_config: dict[str, Any] = field(repr=False)
    reasons: tuple[str, ...]
    """One sentence for each choice, for people."""


def plan(spec: FineTuneSpec, hardware: Hardware) -> Plan:
    """The plan for one machine (or cluster) that is given.

    Raises:
        SpecError: when the spec cannot run there.
    """
    problems = _misfits(spec, hardware)
    if problems:
        raise SpecError(problems)
    precision, precision_reason = _precision(spec, hardware)
    effective, micro, accumulation = spec.batch
    batch = BatchTriple(micro_batch_size=micro, gradient_accumulation_steps=accumulation, world_size=hardware.ranks)
    return Plan(
        spec=spec,
        hardware=hardware,
        precision=precision,
        zero_stage=spec.zero_stage,
        batch=batch,
        deepspeed_config=deepspeed_config(
            EngineSettings(
                batch=batch,
                zero_stage=spec.zero_stage,
                precision=precision,
                gradient_clipping=spec.max_gradient_norm,
                use_gpu=hardware.use_gpu,
            )
        ),
        reasons=(
            f"Runs on {hardware}.",
            precision_reason,
            _ZERO_REASONS[spec.zero_stage].format(ranks=hardware.ranks),
            f"Effective batch {effective} = micro batch {micro} x {accumulation} accumulation "
            f"step{'s' if accumulation > 1 else ''} x {hardware.ranks} rank{'s' if hardware.ranks > 1 else ''}.",
            _method_reason(spec),
            _length_reason(spec),
        ),
    )


def finetune_plan(
    plan: Plan,
    *,
    token: str,
    dataset_uri: str,
    output_uri: str,
    cache_uri: str,
    tracking: TrackingSettings | None = None,
) -> TrainingPlan:
    """What the ranks of a fine-tune receive."""
    return _training_plan(
        plan,
        job="finetune",
        token=token,
        dataset_uri=dataset_uri,
        output_uri=output_uri,
        cache_uri=cache_uri,
        tracking=tracking,
        config=plan.deepspeed_config,
        evaluation=None,
    )


def evaluation_plan(
    plan: Plan,
    evaluation: EvaluationSettings,
    *,
    token: str,
    dataset_uri: str,
    output_uri: str,
    cache_uri: str,
    tracking: TrackingSettings | None = None,
) -> TrainingPlan:
    """What the ranks of an evaluation receive: base and tuned model on the same held-out rows."""
    return _training_plan(
        plan,
        job="evaluate",
        token=token,
        dataset_uri=dataset_uri,
        output_uri=output_uri,
        cache_uri=cache_uri,
        tracking=tracking,
        config={},
        evaluation=evaluation,
    )


def _training_plan(
    plan: Plan,
    *,
    job: str,
    token: str,
    dataset_uri: str,
    output_uri: str,
    cache_uri: str,
    tracking: TrackingSettings | None,
    config: dict[str, Any],
    evaluation: EvaluationSettings | None,
) -> TrainingPlan:
    spec = plan.spec
    max_steps, epochs = spec.length
    return TrainingPlan(
        job=job,
        token=token,
        output_uri=output_uri,
        cache_uri=cache_uri,
        world_size=plan.hardware.ranks,
        model=ModelSettings(ref=spec.model, revision=spec.model_revision, precision=plan.precision.value),
        dataset_uri=dataset_uri,
        method=MethodSettings(
            name=spec.method.value,
            lora_rank=spec.lora_rank,
            lora_alpha=spec.lora_alpha,
            lora_dropout=spec.lora_dropout,
            lora_targets=spec.lora_targets,
        ),
        optimization=OptimizationSettings(
            learning_rate=spec.peak_learning_rate,
            micro_batch_size=plan.batch.micro_batch_size,
            gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
            sequence_length=spec.sequence_length,
            max_steps=max_steps,
            epochs=epochs,
            warmup_ratio=spec.warmup_ratio,
            schedule=spec.schedule.value,
            weight_decay=spec.weight_decay,
            eval_steps=spec.eval_steps,
            eval_rows=spec.evaluation_rows,
            seed=spec.seed,
            gradient_checkpointing=spec.gradient_checkpointing,
        ),
        deepspeed_config=config,
        use_gpu=plan.hardware.use_gpu,
        merge_adapter=spec.merge_adapter,
        tracking=tracking,
        evaluation=evaluation,
    )


def _misfits(spec: FineTuneSpec, hardware: Hardware) -> list[FieldProblem]:
    problems = []
    if spec.ranks != hardware.ranks:
        problems.append(
            FieldProblem(
                field="ranks",
                value=spec.ranks,
                problem=f"does not match the hardware, which holds {hardware.ranks} ({hardware})",
                suggestion=f"Use {hardware.ranks}.",
            )
        )
    if spec.precision is Precision.FP16 and not hardware.use_gpu:
        problems.append(
            FieldProblem(
                field="precision",
                value=spec.precision.value,
                problem="DeepSpeed does not train in fp16 on CPU",
                suggestion="Use 'auto', 'fp32' or 'bf16'.",
            )
        )
    if spec.precision is Precision.BF16 and hardware.use_gpu and not hardware.bf16:
        problems.append(
            FieldProblem(
                field="precision",
                value=spec.precision.value,
                problem="these GPUs have no bfloat16 arithmetic",
                suggestion="Use 'auto' or 'fp16'.",
            )
        )
    return problems


def _precision(spec: FineTuneSpec, hardware: Hardware) -> tuple[Precision, str]:
    if spec.precision is not Precision.AUTO:
        return spec.precision, f"Precision {spec.precision}: asked for."
    if not hardware.use_gpu:
        return Precision.FP32, "Precision fp32: most CPUs compute bf16 and fp16 slower than fp32."
    if hardware.bf16:
        return Precision.BF16, "Precision bf16: half the memory of fp32 with its range, so no loss scaling."
    return Precision.FP16, "Precision fp16 with loss scaling: these GPUs have no bf16."


_ZERO_REASONS = {
    0: "ZeRO stage 0: each of the {ranks} ranks holds weights, gradients and optimizer states whole.",
    1: "ZeRO stage 1: optimizer states are split over {ranks} ranks.",
    2: "ZeRO stage 2: optimizer states and gradients are split over {ranks} ranks; weights stay whole.",
    3: "ZeRO stage 3: weights, gradients and optimizer states are split over {ranks} ranks.",
}


def _method_reason(spec: FineTuneSpec) -> str:
    rate = (
        f"learning rate {spec.peak_learning_rate:g} ({'asked for' if spec.learning_rate else 'usual for the method'})"
    )
    if spec.method is Method.FULL:
        return f"Full fine-tune: every weight is trained, {rate}."
    targets = (
        "every linear layer but the head" if spec.lora_targets == ("all-linear",) else ", ".join(spec.lora_targets)
    )
    return f"LoRA of rank {spec.lora_rank} on {targets}: only the adapter is trained, {rate}."


def _length_reason(spec: FineTuneSpec) -> str:
    max_steps, epochs = spec.length
    if max_steps is not None:
        return f"Ends after {max_steps} optimizer steps, as asked."
    return f"Ends after {epochs:g} epoch{'s' if epochs != 1 else ''} of the data."
