# SPDX-License-Identifier: Apache-2.0
"""How fast one way to train goes on given hardware, and what holds it up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from deepspeed_provider.clusters.calibration import CALIBRATION, Calibration
from deepspeed_provider.clusters.communication import communication
from deepspeed_provider.clusters.compute import micro_step_parts, optimizer_seconds, peak_flops
from deepspeed_provider.clusters.flops import TokenWork, token_work
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.offload import offload_time
from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.options import TrainingOptions
from deepspeed_provider.sizing.weights import Weights, weights


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


@dataclass(frozen=True, kw_only=True)
class Work:
    """What of a model and a way to train it does not depend on hardware, sizes of batches and their number.

    One serves all options that differ in those, in ZeRO stages from 1 to 3 and in offload only.
    """

    num_layers: int
    weights: Weights
    token: TokenWork


def work(architecture: Architecture, options: TrainingOptions) -> Work:
    """Raises :class:`SpecError` for LoRA targets that the model does not have."""
    found = weights(architecture, options)
    return Work(num_layers=architecture.num_layers, weights=found, token=token_work(architecture, found, options))


def throughput(
    architecture: Architecture,
    options: TrainingOptions,
    hardware: Hardware,
    calibration: Calibration = CALIBRATION,
) -> Throughput:
    """Raises :class:`SpecError` for LoRA targets that the model does not have, and where the options are for
    another number of GPUs than the hardware has."""
    return throughput_of(work(architecture, options), options, hardware, calibration)


def throughput_of(
    known: Work, options: TrainingOptions, hardware: Hardware, calibration: Calibration = CALIBRATION
) -> Throughput:
    """As :func:`throughput`, for work that is known already: a search tries many sizes and machines."""
    _refuse_other_hardware(options, hardware)
    micro_steps = options.gradient_accumulation_steps
    micro = micro_step_parts(known.num_layers, known.weights, options, hardware.gpu, known.token, calibration)
    computed = {name: micro_steps * seconds for name, seconds in micro.items()}
    sent = communication(known.num_layers, known.weights, options, hardware, calibration)
    moved = offload_time(known.weights, options, hardware, calibration)
    optimizer = 0.0 if options.offloads_optimizer else optimizer_seconds(known.weights, options, hardware.gpu)

    streams = (sum(computed.values()), sent.overlapped, moved.pcie, moved.nvme)
    hidden = (1 - calibration.exposed) * (sum(streams) - max(streams))
    by_bound = {
        Bound.COMPUTE: {**computed, "optimizer": optimizer},
        Bound.COMMUNICATION: {"communication": sent.overlapped + sent.waited},
        Bound.OFFLOAD: {
            "pcie": moved.pcie + moved.waited_pcie,
            "cpu_optimizer": moved.cpu_optimizer,
            "nvme": moved.nvme + moved.waited_nvme,
        },
    }
    sums = {bound: sum(parts.values()) for bound, parts in by_bound.items()}
    seconds = sum(sums.values()) - hidden
    per_gpu = micro_steps * options.tokens / seconds
    return Throughput(
        tokens_per_second=per_gpu * hardware.world_size,
        tokens_per_second_per_gpu=per_gpu,
        mfu=per_gpu * known.token.model_flops / peak_flops(hardware.gpu, options.precision),
        bound_by=max(sums, key=sums.__getitem__),
        seconds_per_step=seconds,
        parts=tuple(
            TimePart(name=name, bound=bound, seconds=size)
            for bound, parts in by_bound.items()
            for name, size in parts.items()
            if size > 0
        ),
        hidden_seconds=hidden,
    )


def slowed(found: Throughput, factor: float) -> Throughput:
    """The same step, ``factor`` times longer for what its network is worse than its bandwidth says."""
    if factor == 1:
        return found
    waited = TimePart(name="poor_network", bound=Bound.COMMUNICATION, seconds=(factor - 1) * found.seconds_per_step)
    parts = (*found.parts, waited)
    sums = {bound: sum(part.seconds for part in parts if part.bound is bound) for bound in Bound}
    return replace(
        found,
        tokens_per_second=found.tokens_per_second / factor,
        tokens_per_second_per_gpu=found.tokens_per_second_per_gpu / factor,
        mfu=found.mfu / factor,
        bound_by=max(sums, key=sums.__getitem__),
        seconds_per_step=factor * found.seconds_per_step,
        parts=parts,
    )


def _refuse_other_hardware(options: TrainingOptions, hardware: Hardware) -> None:
    if (options.gpus_per_node, options.nodes) == (hardware.gpus_per_node, hardware.nodes):
        return
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
    raise SpecError(problems)
