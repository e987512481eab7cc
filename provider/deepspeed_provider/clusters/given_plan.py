# SPDX-License-Identifier: Apache-2.0
"""The whole plan of a job on hardware that is there already: its settings, and what they rest on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_provider.clusters.engine_settings import engine_settings, with_buckets
from deepspeed_provider.clusters.given import Fitted, fit
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Headroom, Job
from deepspeed_provider.clusters.needs import Shortage
from deepspeed_provider.clusters.refusals import FLASH_COMPUTE_CAPABILITY
from deepspeed_provider.clusters.settings import steps_on_cpu
from deepspeed_provider.clusters.statements import headroom_left, steps_text, training_warnings
from deepspeed_provider.deepspeed_config.generate import deepspeed_config
from deepspeed_provider.deepspeed_config.schema import schema
from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.sizing.options import Attention, Method, OffloadDevice


@dataclass(frozen=True, kw_only=True)
class GivenPlan:
    """Settings with their configuration, or what is missing; ``deepspeed_config`` is None then."""

    job: Job
    hardware: Hardware
    fitted: Fitted | Shortage
    deepspeed_config: Mapping[str, Any] | None
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]


def given_plan(job: Job, hardware: Hardware, *, usd_per_hour: float | None = None) -> GivenPlan:
    """``usd_per_hour``: of all nodes together.

    Raises :class:`SpecError` where the effective batch does not divide over the GPUs, for LoRA targets that the model
    does not have, and for flash attention on a GPU that is too old for it.
    """
    if job.options.attention is Attention.FLASH and hardware.gpu.compute_capability < FLASH_COMPUTE_CAPABILITY:
        raise SpecError([_no_flash(hardware)])
    job = replace(job, options=with_buckets(job.architecture, job.options))
    fitted = fit(job, hardware, usd_per_hour=usd_per_hour)
    if isinstance(fitted, Shortage):
        return GivenPlan(
            job=job,
            hardware=hardware,
            fitted=fitted,
            deepspeed_config=None,
            assumptions=_assumptions(job),
            warnings=(),
        )
    config = deepspeed_config(engine_settings(fitted))
    memory = fitted.memory
    return GivenPlan(
        job=job,
        hardware=hardware,
        fitted=fitted,
        deepspeed_config=config,
        assumptions=tuple(dict.fromkeys((*_assumptions(job), *memory.assumptions))),
        warnings=tuple(dict.fromkeys((*memory.warnings, *training_warnings(fitted), *_warnings(fitted)))),
    )


def _assumptions(job: Job) -> tuple[str, ...]:
    stated = [
        f"{steps_text(job)} of {job.effective_batch_size} sequences of {job.options.sequence_length:,} "
        "tokens, padding included; evaluation and checkpoints take no time.",
        "The hardware is there and idle: nothing has to start, and nothing else takes its memory.",
        headroom_left(Headroom()),
        f"The configuration is written for DeepSpeed {schema().version}.",
    ]
    if not steps_on_cpu(job.options.optimizer):
        stated.append(f"The states of {job.options.optimizer} stay on the GPUs: DeepSpeed steps only Adam on the CPU.")
    return tuple(stated)


def _warnings(found: Fitted) -> list[str]:
    """What must be there beside the GPUs, and which of their numbers is doubtful."""
    gpu, options, stated = found.hardware.gpu, found.options, []
    if options.offload_device is OffloadDevice.NVME:
        stated.append("NVMe offload needs libaio on each node, and its drive at the configuration's nvme_path.")
    if options.method is not Method.FULL:
        stated.append(f"Each node needs {'peft and bitsandbytes' if options.method is Method.QLORA else 'peft'}.")
    if gpu.matmul_source.startswith("assumed"):
        stated.append(f"{gpu.name}: how much of its peak the GPU reaches is assumed, not measured.")
    return stated


def _no_flash(hardware: Hardware) -> FieldProblem:
    return FieldProblem(
        field="attention",
        value=Attention.FLASH.value,
        problem=f"its kernels are for Ampere and later, which {hardware.gpu.name} is not",
        suggestion=f"Use {Attention.SDPA.value}.",
    )
