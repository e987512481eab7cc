# SPDX-License-Identifier: Apache-2.0
"""The fastest settings for hardware that is there already: a running cluster, a Spark Connect server."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_provider.clusters.candidate import Room, Setup
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Headroom, Job
from deepspeed_provider.clusters.needs import Needs, Shortage, fitting, nearest
from deepspeed_provider.clusters.pace import Pace
from deepspeed_provider.clusters.settings import options_for, sequences_per_gpu
from deepspeed_provider.errors import FieldProblem, SpecError


@dataclass(frozen=True, kw_only=True)
class Fitted(Setup):
    """A job on given hardware; nothing has to start, and what an hour costs is known or not."""

    usd_per_hour: float | None

    @property
    def hours(self) -> float:
        return self.steps * self.seconds_per_step / 3600

    @property
    def usd(self) -> float | None:
        """Price of the whole run; None where that of an hour is not known."""
        return None if self.usd_per_hour is None else self.usd_per_hour * self.hours


def fit(
    job: Job, hardware: Hardware, *, usd_per_hour: float | None = None, headroom: Headroom | None = None
) -> Fitted | Shortage:
    """The fastest settings with which the job fits, or what is missing. ``usd_per_hour``: of all nodes together.

    Raises :class:`SpecError` where the effective batch does not divide over the GPUs, and for LoRA targets that the
    model does not have.
    """
    if sequences_per_gpu(job, hardware.world_size) is None:
        raise SpecError([_division(job, hardware.world_size)])
    needs, pace = Needs(job), Pace(job)
    room = Room.of(hardware, headroom or Headroom())
    found = []
    for layout, size in fitting(needs, hardware, room):
        options = options_for(
            job,
            layout,
            hardware.gpu,
            gpus_per_node=hardware.gpus_per_node,
            nodes=hardware.nodes,
            micro_batch_size=size,
        )
        found.append(
            Fitted(
                hardware=hardware,
                layout=layout,
                architecture=job.architecture,
                options=options,
                throughput=pace.throughput(options, hardware),
                steps=job.steps,
                usd_per_hour=usd_per_hour,
            )
        )
    if found:
        return min(found, key=lambda one: (round(one.hours, 6), one.layout.burden))
    shortage = nearest(needs, hardware, room)
    assert shortage is not None  # no layout fits
    return shortage


def _division(job: Job, world_size: int) -> FieldProblem:
    batch = job.effective_batch_size
    near = sorted({max(world_size, batch // world_size * world_size), -(-batch // world_size) * world_size})
    return FieldProblem(
        field="effective_batch_size",
        value=batch,
        problem=f"does not divide over {world_size} GPUs",
        suggestion=f"Use {' or '.join(map(str, near))}.",
    )
