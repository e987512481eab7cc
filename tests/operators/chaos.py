# SPDX-License-Identifier: Apache-2.0
"""What chaos is made of, in virtual time and on real processes alike: what goes wrong, when, and what is right then."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_provider.backends.base import RunIdentity
from deepspeed_provider.testing import endings
from deepspeed_provider.testing.run_json import Run
from deepspeed_provider.testing.timeline import Behaviour, Course
from deepspeed_provider.testing.workspace import behaviour

SEED = 20261130
FAULT_SHARE = 0.3
# A task whose runs all end in a way that is tried again, and which is killed and cleared again and again, has no
# greatest number of tries: of a thousand some need more than 15, and the longest 24. After these nobody disturbs it.
STORMY_TRIES = 15
ENDINGS = {
    "": endings.succeeds(),
    "UNKNOWN": endings.fails("ValueError: no rows"),
    "GPU_OOM": endings.out_of_gpu_memory(rank=1, ranks=2),
    "CAPACITY": endings.stock_out(),
    "HOST_OOM": endings.host_killed(),
    "USER": endings.library_failure(),
    "TRANSIENT": endings.internal_error(),
}
RETRIED = ("UNKNOWN", "CAPACITY", "TRANSIENT")
# Of a generation whose submission was refused for its token, again and again: there is no run of it.
NOT_SENT = "TRANSIENT: Databricks refuses the run"


def course_of_a_run(chance: random.Random, *, second: float = 1.0) -> Behaviour:
    """What happens to one submitted run. ``second``: of the workspace's clock, for a shorter life."""
    return behaviour(
        chance.choices(list(ENDINGS.values()), [12, 1, 1, 1, 1, 1, 1])[0],
        queue_s=chance.choice([0.0, 0.0, 900.0]) * second,
        start_s=chance.uniform(0.0, 600.0) * second,
        run_s=chance.uniform(0.0, 3600.0) * second,
        stop_s=30.0 * second,
    )


class Fate:
    """What one seed has in store for a task instance; to be asked in the order in which things happen."""

    def __init__(self, seed: str) -> None:
        self._chance = random.Random(seed)
        self.deferrable = self._chance.random() < 0.5

    def worker_dies_at(self, try_number: int) -> int | None:
        """In this try, every other one: at which instruction that anything outside its process could see."""
        dies = self._chance.random() < 0.5 and try_number <= STORMY_TRIES
        return self._chance.randint(1, 40) if dies else None

    def is_cleared(self, try_number: int) -> bool:
        """At this look at a task that is alive, in this try."""
        return self._chance.random() < 0.1 and try_number <= STORMY_TRIES

    def triggerer_dies_after_s(self) -> float | None:
        return self._chance.choice([None, None, self._chance.uniform(0.0, 1800.0)])


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a task instance ended, and what the workspace holds of it.

    Attributes:
        runs: of this task, in the order in which they were submitted. ``courses``: of each, now.
        record: what the task keeps of its run; its generation is the last one that was minted.
        cleared: generations at which a person cleared the task.
        output, message: what is told of the end; one of them is empty.
    """

    runs: list[Run]
    courses: list[Course]
    record: Mapping[str, Any]
    cleared: Collection[int]
    output: Any
    message: str

    @property
    def wrong(self) -> list[str]:
        """What is wrong with it."""
        return [*self._paid(), *self._told()]

    def _paid(self) -> list[str]:
        wrong = []
        if len({run.token for run in self.runs}) != len(self.runs) or len(self.runs) > self.record["generation"]:
            wrong.append(f"{len(self.runs)} runs for {self.record['generation']} generations")
        if any(course.ended_ms is None for course in self.courses):
            wrong.append("a run is left behind")
        elif any(
            before.ended_ms > after.submitted_ms for before, after in zip(self.courses, self.runs[1:], strict=False)
        ):
            wrong.append("two runs were alive at once")
        if any(run.cancelled_ms is not None for run in self.runs):
            wrong.append("a run was cancelled, and nobody had asked for it")
        # Who clears a task that has ended wants it to run again.
        early = [
            course.ending.code
            for run, course in zip(self.runs[:-1], self.courses, strict=False)
            if _kind(course.ending) not in RETRIED and self._generation_of(run) not in self.cleared
        ]
        return [*wrong, f"a run was paid for after {early}"] if early else wrong

    def _generation_of(self, run: Run) -> int:
        """By its token: a generation whose submission was refused has no run."""
        key, digest = self.record["key"], self.record["digest"]
        generations = range(1, self.record["generation"] + 1)
        return next(n for n in generations if RunIdentity(key=key, generation=n, digest=digest).token == run.token)

    def _told(self) -> list[str]:
        if self.message.startswith(NOT_SENT):
            return []
        if not self.runs:
            return [f"nothing ran, and it is told that {self.message or self.output}"]
        ending = self.courses[-1].ending
        if ending is None:
            return ["an end is told of a run that goes on"]
        if self.output is not None:
            right = ending.succeeded and self.output["token"] == self.runs[-1].token
            return [] if right else [f"a success is told of a run that ended {ending.code}"]
        kind = _kind(ending)
        told = self.message.partition("\n")[0]
        return [] if kind and self.message.startswith(kind) else [f"{ending.code} is told as {told}"]


def _kind(ending: endings.Ending) -> str | None:
    """None of one that was cancelled."""
    same = (kind for kind, each in ENDINGS.items() if (each.code, each.error) == (ending.code, ending.error))
    return next(same, None)
