# SPDX-License-Identifier: Apache-2.0
"""Why a node type is not in the table: the truth about that type, whatever the table shows."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from deepspeed_provider.clusters.candidate import Candidate, Room, above_text, limit_text, need
from deepspeed_provider.clusters.gpu_plan import gpu_plan
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Constraints, Job, Objective
from deepspeed_provider.clusters.node_types import Cloud, node_types
from deepspeed_provider.clusters.reasons import Miss, OverLimits, Rejection
from deepspeed_provider.clusters.refusals import refusal
from deepspeed_provider.clusters.remedies import what_would_fit
from deepspeed_provider.clusters.search import search
from deepspeed_provider.clusters.settings import options_for
from deepspeed_provider.plan_texts import grouped

from clusters.brute_force import brute_force_reason, random_catalogue, random_constraints, random_job
from clusters.test_search import _job

QUICK, THOROUGH = range(16), range(300, 420)


def _equal_brute_force(seed: int) -> None:
    chance = random.Random(seed)
    job, catalogue, limits = random_job(chance), random_catalogue(chance), random_constraints(chance)
    objective, top = chance.choice(tuple(Objective)), chance.choice((1, 3))
    for found in search(job, catalogue, limits, objective, top).rejections:
        refused = refusal(job, found.node_type, limits)
        if refused:
            assert found.reason == refused
        else:
            _is_true(job, found, limits, brute_force_reason(job, found.node_type, limits, objective))


def _is_true(job: Job, found: Rejection, limits: Constraints, truth: object) -> None:
    if isinstance(truth, Candidate):
        assert found.best == truth
        assert f"${truth.usd:,.2f}" in found.reason
        assert f"{truth.hours:,.1f} h" in found.reason
        return
    number, said = truth
    if isinstance(said, list):
        assert found.best is not None
        assert found.best.excess(limits) == number
        assert sorted(re.findall("over budget|an hour|the deadline", found.reason)) == said
        return
    shortage = found.shortage
    assert shortage is not None
    assert (shortage.missing_bytes, shortage.resource) == (number, said)
    options = options_for(
        job,
        shortage.layout,
        found.node_type.gpu,
        gpus_per_node=found.node_type.gpus,
        nodes=shortage.nodes,
        micro_batch_size=shortage.micro_batch_size,
    )
    room = Room.of(Hardware.of(found.node_type, shortage.nodes), limits.headroom)
    assert need(job, options).shortfalls(room)[said] == number, "with the settings that it names"


@pytest.mark.parametrize("seed", QUICK)
def test_reasons_equal_trying_everything(seed: int) -> None:
    _equal_brute_force(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", THOROUGH)
def test_reasons_equal_trying_everything_often(seed: int) -> None:
    _equal_brute_force(seed)


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("seed", range(8))
def test_how_many_rows_are_shown_is_no_matter(seed: int, objective: Objective) -> None:
    chance = random.Random(seed)
    job, catalogue, limits = random_job(chance), random_catalogue(chance), random_constraints(chance)
    few, many = (
        {one.node_type: one for one in search(job, catalogue, limits, objective, top).rejections} for top in (1, 6)
    )
    assert set(many) <= set(few)
    assert {kind: few[kind] for kind in many} == many


@pytest.mark.parametrize("seed", range(12))
def test_the_nearest_miss_is_the_nearest(seed: int) -> None:
    chance = random.Random(seed)
    tight = {"budget_usd": 0.001, "deadline_hours": 0.1} if seed % 3 else {}
    job, limits = random_job(chance), replace(random_constraints(chance), **tight)
    catalogue = random_catalogue(chance)
    found = search(job, catalogue, limits)
    miss, tried = found.nearest_miss, [one for one in found.rejections if one.best or one.shortage]
    if found.best is not None:
        assert miss is None
    elif fits := [one.best.excess(limits) for one in tried if one.best]:
        assert isinstance(miss, OverLimits)
        assert miss.excess == min(fits)
    elif tried:
        assert isinstance(miss, Miss)
        assert miss.missing_bytes == min(one.shortage.missing_bytes for one in tried if one.shortage)


def test_a_budget_that_is_too_small_names_the_cheapest_and_what_it_would_have_to_be() -> None:
    limits = Constraints(budget_usd=0.5)
    found, best = search(_job(), node_types(), limits), search(_job(), node_types()).best
    assert best is not None
    assert isinstance(found.nearest_miss, OverLimits)
    assert found.nearest_miss.candidate == best
    (budget,) = [text for text in what_would_fit(_job(), node_types(), limits) if text.startswith("a budget of ")]
    assert f"({best.node_type.node_type_id} x {best.nodes}: ${best.usd:,.2f}, " in budget
    raised = Constraints(budget_usd=float(budget.split()[3].lstrip("$")))
    assert search(_job(), node_types(), raised).best == best


REMEDIES = {
    "price of an hour": (Constraints(max_usd_per_hour=0.1), "a limit of $"),
    "deadline": (Constraints(deadline_hours=0.201), "a deadline of "),
    "two limits": (Constraints(max_usd_per_hour=0.1, budget_usd=0.1), "a budget of $"),
    "spot": (Constraints(spot=True, clouds=frozenset({Cloud.AWS})), "on demand instead of spot ("),
    "cloud": (Constraints(spot=True, clouds=frozenset({Cloud.AWS})), "another cloud ("),
    "region": (Constraints(regions=frozenset({"moon"})), "another region ("),
    "node types": (Constraints(families=("g9",)), "other node types ("),
}


@pytest.mark.parametrize(("limits", "said"), REMEDIES.values(), ids=REMEDIES)
def test_what_would_have_to_be_changed_is_said(limits: Constraints, said: str) -> None:
    assert search(_job(), node_types(), limits).best is None
    assert any(text.startswith(said) for text in what_would_fit(_job(), node_types(), limits))


def test_limits_that_have_to_be_raised_together_are_named_together() -> None:
    limits = Constraints(max_usd_per_hour=0.1, budget_usd=0.1)
    assert " and a limit of $" in what_would_fit(_job(), node_types(), limits)[0]


@pytest.mark.parametrize(
    ("reached", "limit", "decimals", "said"),
    [
        (0.13, 0.001, 2, ("0.13", "0.001")),
        (1.004, 1.0, 2, ("1.004", "1.00")),
        (0.26, 0.25, 1, ("0.3", "0.25")),
        (1234.5, 1000, 2, ("1,234.50", "1,000.00")),
    ],
)
def test_what_is_above_a_limit_reads_so(reached: float, limit: float, decimals: int, said: tuple[str, str]) -> None:
    assert (above_text(reached, limit, decimals), limit_text(limit, decimals)) == said


def test_of_like_reasons_the_closest_is_shown() -> None:
    plan = gpu_plan(_job(), node_types(), Constraints(budget_usd=0.01))
    (shown,) = [reason for _, reason in grouped(plan) if reason.startswith("over budget")]
    prices = [float(one.reason.split()[2].lstrip("$")) for one in plan.refused if one.reason.startswith("over budget")]
    assert len(prices) > 10
    assert shown.startswith(f"over budget: ${min(prices):.2f} of $0.01 at best (")
