# SPDX-License-Identifier: Apache-2.0
"""How fast one way to train goes on given hardware, and what holds it up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from deepspeed_provider.clusters.calibration import CALIBRATION, Calibration
from deepspeed_provider.clusters.communication import communication
from deepspeed_provider.clusters.compute import micro_step_parts, optimizer_seconds, peak_flops
from deepspeed_provider.clusters.flops import token_work
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.offload import offload_time
from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.options import TrainingOptions
from deepspeed_provider.sizing.weights import weights


class Bound(StrEnum):
    """What a step spends most of its time on."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    OFFLOAD = "offload"


@dataclass(frozen=True, kw_only=True)
class TimePart:
    """Seconds of one optimizer step."""

    name: str
    bound: Bound
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Of a steady run, without evaluation and checkpoints.

    Attributes:
        tokens_per_second: of all GPUs, padding included.
        mfu: the share of the GPUs' peak in this precision that the result needed; recomputation does not count.
        bound_by: the kind of work with the most seconds.
        parts: each with its own duration; what runs beside something else is subtracted by ``hidden_seconds``.
    """

    tokens_per_second: float
    tokens_per_second_per_gpu: float
    mfu: float
    bound_by: Bound
    seconds_per_step: float
    parts: tuple[TimePart, ...]
    hidden_seconds: float


def throughput(
    architecture: Architecture,
    options: TrainingOptions,
    hardware: Hardware,
    calibration: Calibration = CALIBRATION,
) -> Throughput:
    """Raises :class:`SpecError` for LoRA targets that the model does not have, and where the options are for
    another number of GPUs than the hardware has."""
    _refuse_other_hardware(options, hardware)
    found = weights(architecture, options)
    work = token_work(architecture, found, options)
    micro_steps = options.gradient_accumulation_steps
    micro = micro_step_parts(architecture, found, options, hardware.gpu, work, calibration)
    computed = {name: micro_steps * seconds for name, seconds in micro.items()}
    sent = communication(architecture.num_layers, found, options, hardware, calibration)
    moved = offload_time(found, options, hardware, calibration)
    optimizer = 0.0 if options.offloads_optimizer else optimizer_seconds(found, options, hardware.gpu)

    streams = (sum(computed.values()), sent.overlapped, moved.pcie, moved.nvme)
    hidden = (1 - calibration.exposed) * (sum(streams) - max(streams))
    parts = _present(
        [
            *(TimePart(name=name, bound=Bound.COMPUTE, seconds=seconds) for name, seconds in computed.items()),
            TimePart(name="optimizer", bound=Bound.COMPUTE, seconds=optimizer),
            TimePart(name="communication", bound=Bound.COMMUNICATION, seconds=sent.overlapped + sent.waited),
            TimePart(name="pcie", bound=Bound.OFFLOAD, seconds=moved.pcie + moved.waited_pcie),
            TimePart(name="cpu_optimizer", bound=Bound.OFFLOAD, seconds=moved.cpu_optimizer),
            TimePart(name="nvme", bound=Bound.OFFLOAD, seconds=moved.nvme + moved.waited_nvme),
        ]
    )
    seconds = sum(part.seconds for part in parts) - hidden
    per_gpu = micro_steps * options.tokens / seconds
    return Throughput(
        tokens_per_second=per_gpu * hardware.world_size,
        tokens_per_second_per_gpu=per_gpu,
        mfu=per_gpu * work.model_flops / peak_flops(hardware.gpu, options.precision),
        bound_by=max(Bound, key=lambda bound: sum(part.seconds for part in parts if part.bound is bound)),
        seconds_per_step=seconds,
        parts=parts,
        hidden_seconds=hidden,
    )


def _present(parts: list[TimePart]) -> tuple[TimePart, ...]:
    return tuple(part for part in parts if part.seconds > 0)


def _refuse_other_hardware(options: TrainingOptions, hardware: Hardware) -> None:
    problems = [
        FieldProblem(
            field=name,
            value=getattr(options, name),
            problem=f"the hardware has {getattr(hardware, name)}",
            suggestion=f"Use {getattr(hardware, name)}, or describe other hardware.",
        )
        for name in ("gpus_per_node", "nodes")
        if getattr(options, name) != getattr(hardware, name)
    ]
    if problems:
        raise SpecError(problems)
