# SPDX-License-Identifier: Apache-2.0
"""The total of GPU memory without its parts, for a search that asks for thousands.

Exactly what :func:`deepspeed_provider.sizing.estimate.estimate` sums up: tests/sizing/test_totals.py holds
the two against each other. What does not depend on the micro-batch is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed_provider.sizing import model_states
from deepspeed_provider.sizing.activations import GIVEN_AWAY, moments
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.buffers import zero_buffers
from deepspeed_provider.sizing.gpu import MOVING, gradients_at, normed_on_the_way, overhead_step
from deepspeed_provider.sizing.mode import Mode
from deepspeed_provider.sizing.options import TrainingOptions
from deepspeed_provider.sizing.overhead import CALIBRATION, CUBLAS_WORKSPACE_BYTES, overhead
from deepspeed_provider.sizing.parts import Part
from deepspeed_provider.sizing.weights import Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes at one moment of a step beside the model states; the gradient in flight is not among ``total``."""

    name: str
    total: int
    moving: int
    logits: int
    gradients_done: float
    gradient_in_flight: int
    beyond_kept_gradients: int


def activations(architecture: Architecture, how: Mode, *, checkpointing: bool) -> tuple[Activations, ...]:
    """At every moment at which a step can peak."""
    return tuple(
        Activations(
            name=moment.name,
            total=moment.activation_bytes,
            moving=sum(size for name, size in moment.activations.items() if name in MOVING),
            logits=moment.activations.get("logits_and_loss", 0),
            gradients_done=moment.gradients_done,
            gradient_in_flight=moment.gradient_in_flight,
            beyond_kept_gradients=moment.beyond_kept_gradients,
        )
        for moment in moments(architecture, how, checkpointing=checkpointing)
    )


class GpuTotals:
    """Bytes on the fullest GPU under options that differ in micro-batch size and accumulation only."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        options: TrainingOptions,
        twin: GpuTotals | None = None,
    ) -> None:
        """``twin``: of options that differ in checkpointing only, which leaves the model states as they are."""
        self._weights = weights
        self._once, self._summed = (
            options.model_copy(update={"gradient_accumulation_steps": steps}) for steps in (1, 2)
        )
        if twin is None:
            self._resident = _resident(weights, options)
            self._between_passes = self._resident + _between_passes(architecture, weights, options)
            self._kept: dict[tuple[str, float, bool], int] = {}
        else:
            self._resident, self._between_passes, self._kept = twin._resident, twin._between_passes, twin._kept
        self._norm_at = normed_on_the_way(architecture, weights, options)
        self._left_out = GIVEN_AWAY - self._norm_at
        buffers = zero_buffers(architecture, weights, options)
        step = overhead_step(buffers, options)
        self._standing = self._resident + _sum(buffers)
        self._gathered = step.moving_bytes
        self._kind = CALIBRATION.gathered if step.gathers else CALIBRATION.in_place
        self._changing = CALIBRATION.changing_lengths if step.lengths_change else 0
        found = overhead(step)
        self._beside = found.cuda_context + found.nccl

    @property
    def least_bytes(self) -> int:
        """What no micro-batch is small enough to stay below."""
        return self._between_passes + self._beside

    def total_bytes(self, found: Iterable[Activations], *, accumulates: bool) -> int:
        """With a micro-batch's activations, and with gradients of several micro-batches added up or not."""
        in_place = self._once.zero_stage < 2 and not accumulates
        held = self._between_passes
        for moment in found:
            if moment.name in self._left_out:
                continue
            flight = moment.beyond_kept_gradients if in_place else moment.gradient_in_flight
            allocated = self._standing + self._gradients(moment, accumulates) + flight + moment.total
            moving = moment.moving + flight + self._gathered
            lost = round(self._kind.moving_share * moving + self._changing * moment.logits)
            held = max(held, allocated + self._kind.fixed_bytes + lost)
        return held + self._beside

    def _gradients(self, moment: Activations, accumulates: bool) -> int:
        key = (moment.name, moment.gradients_done, accumulates)
        found = self._kept.get(key)
        if found is None:
            options = self._summed if accumulates else self._once
            parts = gradients_at(moment.name, moment.gradients_done, self._weights, options, self._norm_at)
            found = self._kept[key] = _sum(parts)
        return found


def _resident(weights: Weights, options: TrainingOptions) -> int:
    parts = [*model_states.weight_parts(weights, options), *model_states.optimizer_parts(weights, options)]
    return _sum(parts) + CUBLAS_WORKSPACE_BYTES


def _between_passes(architecture: Architecture, weights: Weights, options: TrainingOptions) -> int:
    """The most that is held beside what is resident, with fragmentation, when no pass runs."""
    found = model_states.between_passes(architecture, weights, options).values()
    return max(_sum(parts) + _fragmentation(parts, options) for parts in found)


def _sum(parts: Iterable[Part]) -> int:
    return sum(part.bytes for part in parts)


def _fragmentation(parts: Iterable[Part], options: TrainingOptions) -> int:
    return overhead(overhead_step(parts, options)).fragmentation
