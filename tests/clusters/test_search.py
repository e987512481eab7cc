# SPDX-License-Identifier: Apache-2.0
"""The search against one that tries everything, and what must hold of any search."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from deepspeed_provider.clusters.candidate import Candidate, Room, need
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Constraints, Headroom, Job, Objective
from deepspeed_provider.clusters.node_types import node_types
from deepspeed_provider.clusters.pace import Pace
from deepspeed_provider.clusters.remedies import what_would_fit
from deepspeed_provider.clusters.search import Choice, search
from deepspeed_provider.clusters.settings import layouts, micro_batch_sizes, node_counts
from deepspeed_provider.sizing.options import parse_options

from clusters.brute_force import (
    brute_force,
    candidate,
    known,
    random_catalogue,
    random_constraints,
    random_job,
)

QUICK, THOROUGH = range(12), range(100, 260)


def _rows(found: tuple[Candidate, ...] | list[Candidate]) -> list[tuple[object, ...]]:
    return [
        (
            one.node_type.node_type_id,
            one.node_type.region,
            one.nodes,
            str(one.layout),
            one.options.micro_batch_size,
            one.options.gradient_accumulation_steps,
            one.usd,
            one.hours,
        )
        for one in found
    ]


def _equals_brute_force(seed: int) -> int:
    chance = random.Random(seed)
    job, catalogue, limits = random_job(chance), random_catalogue(chance), random_constraints(chance)
    objective, top = chance.choice(tuple(Objective)), chance.choice((1, 5, 10, 200))
    found = search(job, catalogue, limits, objective, top)
    assert _rows(found.candidates) == _rows(brute_force(job, catalogue, limits, objective, top))
    _everything_is_accounted_for(found, catalogue)
    return len(found.candidates)


def _everything_is_accounted_for(found: Choice, catalogue: tuple[object, ...]) -> None:
    shown = {one.node_type for one in found.candidates}
    refused = [one.node_type for one in found.rejections]
    assert len(refused) == len(set(refused))
    assert shown | set(refused) == set(catalogue)
    assert not shown & set(refused)
    assert all(one.reason for one in found.rejections)


@pytest.mark.parametrize("seed", QUICK)
def test_equals_trying_everything(seed: int) -> None:
    _equals_brute_force(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", THOROUGH)
def test_equals_trying_everything_often(seed: int) -> None:
    _equals_brute_force(seed)


def _job(**given: object) -> Job:
    options = {"method": "lora", "sequence_length": 1024, **given}
    return Job(
        architecture=known("meta-llama/Llama-2-7b-hf"),
        options=parse_options(options),
        tokens=10_000_000,
        effective_batch_size=32,
    )


@pytest.mark.parametrize("seed", range(5))
def test_no_settings_are_faster_than_the_bound(seed: int) -> None:
    chance = random.Random(seed)
    job, kinds = random_job(chance), random_catalogue(chance)
    pace = Pace(job)
    for kind in kinds:
        for nodes in node_counts(job, kind.gpus, least=1, most=3):
            hardware = Hardware.of(kind, nodes)
            sizes = micro_batch_sizes(job.effective_batch_size // hardware.world_size)
            alone, has_nvme = hardware.world_size == 1, kind.nvme_bytes > 0
            for layout in layouts(job.options.method, alone=alone, has_nvme=has_nvme, optimizer=job.options.optimizer):
                size = chance.choice(sizes)
                tried = candidate(job, kind, nodes, layout, size, spot=False)
                bound = pace.least_seconds_of(layout, size, hardware)
                assert pace.least_seconds(hardware) <= bound * (1 + 1e-9) <= tried.seconds_per_step * (1 + 1e-9)


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("seed", range(4))
def test_order_of_the_catalogue_is_no_matter(seed: int, objective: Objective) -> None:
    chance = random.Random(seed)
    job, catalogue = random_job(chance), random_catalogue(chance)
    other = list(catalogue)
    chance.shuffle(other)
    first, second = search(job, catalogue, objective=objective), search(job, other, objective=objective)
    assert first.candidates == second.candidates
    assert set(first.rejections) == set(second.rejections)
    assert (first.nearest_miss, first.assumptions, first.warnings) == (
        second.nearest_miss,
        second.assumptions,
        second.warnings,
    )


def _best(found: Choice) -> float:
    return found.best.usd if found.best else float("inf")


@pytest.mark.parametrize("seed", range(8))
def test_more_to_choose_from_is_never_worse(seed: int) -> None:
    chance = random.Random(seed)
    job, catalogue = random_job(chance), random_catalogue(chance)
    dear = Constraints(budget_usd=chance.choice((1.0, 10.0, 100.0)))
    whole = _best(search(job, catalogue))
    assert whole <= _best(search(job, catalogue[: len(catalogue) // 2]))
    assert whole <= _best(search(job, catalogue, dear))
    assert _best(search(job, catalogue, replace(dear, budget_usd=200.0))) <= _best(search(job, catalogue, dear))
    assert whole >= _best(search(job, catalogue, Constraints(max_nodes=8)))
    cheaper = [replace(kind, on_demand_usd_per_hour=0.8 * kind.on_demand_usd_per_hour) for kind in catalogue]
    assert _best(search(job, cheaper)) <= whole


@pytest.mark.parametrize("seed", range(8))
def test_what_is_chosen_passes_sizing(seed: int) -> None:
    chance = random.Random(seed)
    job, headroom = random_job(chance), Headroom(gpu=0.08, host=0.2, nvme=0.3)
    for found in search(job, random_catalogue(chance), Constraints(headroom=headroom)).candidates:
        room = Room.of(found.hardware, headroom)
        assert not need(job, found.options).shortfalls(room)
        assert found.memory.gpu.total_bytes <= (1 - headroom.gpu) * found.node_type.gpu.memory_bytes
        triple = found.options.micro_batch_size * found.options.gradient_accumulation_steps * found.options.world_size
        assert triple == job.effective_batch_size


REASONS = {
    "retired": (Constraints(), "p3.2xlarge", "retired"),
    "cloud": (Constraints(regions=frozenset({"eastus"})), "p4d.24xlarge", "on aws in us-east-1, not in eastus"),
    "generation": (
        Constraints(min_compute_capability=(8, 0)),
        "g4dn.xlarge",
        "T4 has compute capability 7.5, no bf16; at least 8.0 is asked for",
    ),
    "family": (Constraints(families=("g5",)), "p4d.24xlarge", "not among the node types asked for"),
    "spot": (Constraints(spot=True), "p4d.24xlarge", "no known spot price"),
    "price": (Constraints(max_usd_per_hour=5.0), "p4d.24xlarge", "an hour, above the limit of $5.00"),
    "budget": (Constraints(budget_usd=0.25), "g5.2xlarge", "over budget: $"),
    "deadline": (Constraints(deadline_hours=0.25), "g5.2xlarge", "h, beyond the deadline of 0.25 h at best ("),
    "memory, not the budget": (
        Constraints(budget_usd=0.25),
        "g5.xlarge",
        "1.7 GiB of host memory too little at best (1 node, ZeRO 1, micro-batch 1)",
    ),
    "memory": (Constraints(max_nodes=1), "g4dn.xlarge", "GiB of host memory too little at best (1 node, ZeRO "),
    "dearer": (Constraints(), "p5.48xlarge", "), not cheaper than the rows shown"),
}


@pytest.mark.parametrize(("constraints", "node_type_id", "reason"), REASONS.values(), ids=REASONS)
def test_every_refusal_names_its_numbers(constraints: Constraints, node_type_id: str, reason: str) -> None:
    found = search(_job(), node_types(), constraints)
    assert reason in {one.node_type.node_type_id: one.reason for one in found.rejections}[node_type_id]


def test_a_batch_that_does_not_divide_is_named() -> None:
    job = replace(_job(), effective_batch_size=3)
    reasons = {one.node_type.node_type_id: one.reason for one in search(job, node_types()).rejections}
    assert reasons["p4d.24xlarge"] == "an effective batch of 3 does not divide over 1 to 4 nodes of 8 GPUs"


def test_what_fits_nowhere_says_how_close_it_came_and_what_would_help() -> None:
    kinds = [kind for kind in node_types() if kind.node_type_id in ("g5.2xlarge", "g4dn.2xlarge")]
    job = replace(_job(method="full"), effective_batch_size=4)
    found = search(job, kinds, Constraints(max_nodes=1))
    assert found.best is None
    miss = found.nearest_miss
    assert miss is not None
    assert miss.missing_bytes > 0
    at_best = {one.node_type.node_type_id: one.reason for one in found.rejections}
    assert at_best[miss.node_type.node_type_id] == str(miss)
    helps = what_would_fit(job, kinds, Constraints(max_nodes=1))
    assert any(said.startswith("method qlora (g5.2xlarge x 1: $") for said in helps)


def test_a_batch_that_would_divide_is_said() -> None:
    kinds = [kind for kind in node_types() if kind.node_type_id == "p4d.24xlarge"]
    odd = replace(_job(), effective_batch_size=30)
    assert search(odd, kinds).best is None
    assert any(text.startswith("an effective batch size of 32 (") for text in what_would_fit(odd, kinds, Constraints()))


def test_the_table_says_what_it_rests_on() -> None:
    limits = Constraints(families=("Standard_NC4as", "Standard_NC8as", "g4dn"), min_nodes=2, max_nodes=2)
    found = search(replace(_job(method="qlora"), effective_batch_size=2), node_types(), limits)
    assert found.best is not None
    said = " ".join(found.assumptions)
    for text in (
        "Left free: 5% of GPU memory, 10% of host memory, 10% of NVMe.",
        "12 minutes until it trains",
        "has a driver of their type, which is billed",
        "On-demand prices of aws in us-east-1, as of 2026-07-20",
    ):
        assert text in said
    if any(one.node_type.poor_network for one in found.candidates):
        assert any("advised against" in warning for warning in found.warnings)


def test_rows_with_doubtful_numbers_are_named() -> None:
    ids = frozenset({"Standard_NC8as_T4_v3", "gr6.4xlarge"})
    found = search(_job(method="qlora"), node_types(), Constraints(node_type_ids=ids, max_nodes=2))
    assert {one.node_type.node_type_id for one in found.candidates} == ids
    warnings = " ".join(found.warnings)
    assert "gr6.4xlarge: known to Databricks only from its DBU table." in warnings
    assert "gr6.4xlarge: how much of its peak the GPU reaches is assumed" in warnings
    assert ("Standard_NC8as_T4_v3: training over several nodes" in warnings) is any(
        one.nodes > 1 and one.node_type.poor_network for one in found.candidates
    )


def test_a_network_that_is_assumed_is_named_only_where_it_is_used() -> None:
    (kind,) = [kind for kind in node_types() if kind.node_type_id == "g5.12xlarge"]
    doubted = replace(kind, notes="network not sourced: 10 Gbps assumed", poor_network=True)
    one, two = (search(_job(), [doubted], Constraints(min_nodes=nodes, max_nodes=nodes)) for nodes in (1, 2))
    assert not any("bandwidth is assumed" in warning for warning in one.warnings)
    assert any("bandwidth is assumed" in warning for warning in two.warnings)
    assert any("advised against" in warning for warning in two.warnings)
    assert any("1.25 times slower" in said for said in two.assumptions)
