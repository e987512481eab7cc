# SPDX-License-Identifier: Apache-2.0
"""What the distributor calls in every rank: one plan in, one result out, and a file for whatever happened."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import failures, guardian, once, storage
from .plan import TrainingPlan
from .progress import Reporter
from .ranks import Rank, choose_accelerator, leave_process_group, peak_memory_bytes

log = logging.getLogger(__name__)

Job = Callable[[TrainingPlan, Rank, Reporter], dict[str, Any]]


def main(payload: dict[str, Any]) -> dict[str, Any]:
    """Run one rank of the plan in ``payload`` (``TrainingPlan.to_json``).

    Files in ``output_uri``: ``started-rank<N>.json`` at once; ``progress.json`` and ``progress.jsonl``
    meanwhile; ``result.json`` when all of it is done, or ``failure-rank<N>.json`` before an exception
    leaves this function. A generation runs once: a second start finds the marker of the first, and
    hands back its result if there is one, else raises ``AlreadyStarted``.

    Returns:
        The result in rank 0; in other ranks their rank and the token only.
    """
    guardian.start(os.environ)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # The cluster keeps the last 100 lines of a failed rank; progress bars would push out the cause.
    os.environ.setdefault("TQDM_DISABLE", "1")
    use_gpu = bool(payload.get("use_gpu", True))
    rank = Rank.from_environment(os.environ, use_gpu=use_gpu)
    output_uri = payload.get("output_uri")
    reporter = Reporter(
        output_uri if rank.is_first and isinstance(output_uri, str) else None,
        clock=time.time,
        peak_memory=lambda: peak_memory_bytes(use_gpu),
    )
    try:
        return _run_once(payload, rank, reporter)
    except BaseException as error:
        if isinstance(output_uri, str):
            now = reporter.now
            once.write_failure(output_uri, error, rank, phase=now.phase, step=now.step)
        raise


def _run_once(payload: dict[str, Any], rank: Rank, reporter: Reporter) -> dict[str, Any]:
    plan = parse_plan(payload)
    if not once.mark_started(plan.output_uri, plan.token, rank):
        return _earlier_result(plan)
    if rank.world_size != plan.world_size:
        raise failures.InputError(
            f"world_size = {plan.world_size} in the plan, but {rank.world_size} ranks were started. "
            f"The DeepSpeed batch sizes hold for {plan.world_size} only: plan again for the cluster that is there."
        )
    choose_accelerator(plan.use_gpu)
    reporter.update(phase="loading")
    result = job_of(plan)(plan, rank, reporter)
    # Nobody leaves before all are through: the result must not stand beside another rank's failure.
    leave_process_group()
    if not rank.is_first:
        return {"rank": rank.rank, "token": plan.token}
    reporter.update(phase="done")
    result = {"job": plan.job, "token": plan.token, "world_size": plan.world_size, **result}
    storage.write_json(storage.join(plan.output_uri, "result.json"), result)
    return result


def parse_plan(payload: Mapping[str, Any]) -> TrainingPlan:
    """The plan in ``payload``; raises InputError where it is not one."""
    groups = ("model", "method", "optimization")
    if missing := [name for name in groups if not isinstance(payload.get(name), Mapping)]:
        raise failures.InputError(f"the training plan cannot be read: {', '.join(missing)} must be an object")
    try:
        return TrainingPlan.from_json(dict(payload))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise failures.InputError(f"the training plan cannot be read: {error}") from error


def job_of(plan: TrainingPlan) -> Job:
    """The function that does ``plan.job``; imported here, so that a job needs only its own libraries."""
    if plan.job == "finetune":
        from .causal_lm import finetune

        return finetune
    if plan.job == "evaluate":
        from .evaluate import evaluate

        return evaluate
    raise failures.InputError(f"job = {plan.job!r}: unknown. Use 'finetune' or 'evaluate'.")


def _earlier_result(plan: TrainingPlan) -> dict[str, Any]:
    """The result of the first start. Raises AlreadyStarted, since training twice would be paid twice."""
    try:
        result: dict[str, Any] = storage.read_json(storage.join(plan.output_uri, "result.json"))
    except (OSError, ValueError):
        result = {}
    if result.get("token") == plan.token:
        log.warning("this generation has finished before: handing back its result")
        return result
    raise once.second_start(plan.output_uri)
