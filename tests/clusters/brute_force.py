# SPDX-License-Identifier: Apache-2.0
"""The search as anybody would write it first: everything is tried. And random catalogues and jobs to try."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache

from deepspeed_provider.clusters.candidate import Candidate, candidate, need
from deepspeed_provider.clusters.gpus import GIB, gpu
from deepspeed_provider.clusters.job import Constraints, Job, Objective
from deepspeed_provider.clusters.node_type import Cloud, NodeType, Support
from deepspeed_provider.clusters.refusals import refusal
from deepspeed_provider.clusters.settings import layouts
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import parse_options

GPUS = ("T4", "V100-16GB", "A10G", "L4", "L40S", "A100-40GB", "A100-80GB", "H100")
MODELS = (
    ("HuggingFaceTB/SmolLM2-135M", "full"),
    ("Qwen/Qwen2.5-0.5B", "full"),
    ("google/gemma-2-2b", "full"),
    ("meta-llama/Llama-2-7b-hf", "full"),
    ("meta-llama/Llama-2-7b-hf", "lora"),
    ("meta-llama/Llama-2-13b-hf", "qlora"),
    ("meta-llama/Llama-2-70b-hf", "full"),
    ("meta-llama/Llama-2-70b-hf", "qlora"),
)


def brute_force(
    job: Job, node_types: Iterable[NodeType], constraints: Constraints, objective: Objective, top: int
) -> list[Candidate]:
    """Every node type, number of nodes, layout and micro-batch; of each type and number of nodes the best."""
    found = []
    for node_type in node_types:
        if refusal(job, node_type, constraints):
            continue
        for nodes in range(constraints.min_nodes, constraints.max_nodes + 1):
            ways = [way for way in _ways(job, node_type, nodes, constraints) if _allowed(job, way, constraints)]
            if ways:
                found.append(min(ways, key=lambda way: way.rank(objective)))
    return sorted(found, key=lambda way: way.rank(objective))[:top]


def brute_force_reason(
    job: Job, node_type: NodeType, constraints: Constraints, objective: Objective
) -> Candidate | tuple[float, list[str]] | tuple[int, str]:
    """Why a type that may be tried is not in the table: its best candidate, else by how much the best of those that
    fit exceeds which limits, else (bytes, resource) that are missing at best."""
    every = [
        way
        for nodes in range(constraints.min_nodes, constraints.max_nodes + 1)
        for way in _ways(job, node_type, nodes, constraints)
    ]
    allowed = [way for way in every if _allowed(job, way, constraints)]
    if allowed:
        return min(allowed, key=lambda way: way.rank(objective))
    fitting = [way for way in every if not any(_missing(job, way, constraints).values())]
    if fitting:
        return min(_exceeds(way, constraints) for way in fitting)
    least = [max((size, name) for name, size in _missing(job, way, constraints).items()) for way in every]
    return min(least)


def _exceeds(way: Candidate, constraints: Constraints) -> tuple[float, list[str]]:
    limits = {
        "over budget": (way.usd, constraints.budget_usd),
        "an hour": (way.usd_per_hour, constraints.max_usd_per_hour),
        "the deadline": (way.hours, constraints.deadline_hours),
    }
    times = {name: reached / limit for name, (reached, limit) in limits.items() if limit is not None}
    return max(times.values()), sorted(name for name, factor in times.items() if factor > 1)


def _ways(job: Job, node_type: NodeType, nodes: int, constraints: Constraints) -> list[Candidate]:
    ranks = nodes * node_type.gpus
    if job.effective_batch_size % ranks:
        return []
    sequences = job.effective_batch_size // ranks
    return [
        candidate(job, node_type, nodes, layout, size, spot=constraints.spot)
        for layout in layouts(
            job.options.method, alone=ranks == 1, has_nvme=node_type.nvme_bytes > 0, optimizer=job.options.optimizer
        )
        for size in range(1, sequences + 1)
        if sequences % size == 0
    ]


def _allowed(job: Job, way: Candidate, constraints: Constraints) -> bool:
    limits = (
        (way.usd_per_hour, constraints.max_usd_per_hour),
        (way.usd, constraints.budget_usd),
        (way.hours, constraints.deadline_hours),
    )
    if any(limit is not None and reached > limit for reached, limit in limits):
        return False
    return not any(_missing(job, way, constraints).values())


def _missing(job: Job, way: Candidate, constraints: Constraints) -> dict[str, int]:
    needed, kind, free = _need(job, way.options), way.node_type, constraints.headroom
    return {
        "GPU memory": max(0, needed.gpu_bytes - int(kind.gpu.memory_bytes * (1 - free.gpu))),
        "host memory": max(0, needed.host_bytes - int(kind.ram_bytes * (1 - free.host))),
        "NVMe": max(0, needed.nvme_bytes - int(kind.nvme_bytes * (1 - free.nvme))),
    }


# The same estimate for many machines: kept, as it is slow, and never asked whether it could be left out.
_need = lru_cache(maxsize=200_000)(need)


@cache
def known(name: str) -> Architecture:
    return architecture(model_config(name))


def random_job(chance: random.Random) -> Job:
    """Small and large models, all methods; batches with and without accumulation."""
    model, method = chance.choice(MODELS)
    options = parse_options(
        {
            "method": method,
            "sequence_length": chance.choice((128, 512, 2048, 4096)),
            "optimizer": chance.choice(("adamw", "adamw", "adamw-8bit", "paged-adamw", "sgd")),
            "loss": chance.choice(("full", "full", "fused")),
            "padding": chance.choice(("max-length", "max-length", "longest")),
            "attention": chance.choice(("sdpa", "flash", "eager")),
            "lora_rank": chance.choice((8, 64)),
        }
    )
    return Job(
        architecture=known(model),
        options=options,
        tokens=chance.choice((100_000, 20_000_000)),
        effective_batch_size=chance.choice((1, 8, 12, 16, 32)),
    )


def random_catalogue(chance: random.Random, least: int = 15) -> tuple[NodeType, ...]:
    """Of coarse prices and sizes, so that ties are common; some hardware twice under other names."""
    found = [_random_node_type(chance, f"node-{number}") for number in range(least)]
    twins = [replace(one, node_type_id=f"{one.node_type_id}-twin") for one in chance.sample(found, 3)]
    elsewhere = [replace(one, region="west") for one in chance.sample(found, 2)]
    found += twins + elsewhere
    chance.shuffle(found)
    return tuple(found)


def _random_node_type(chance: random.Random, name: str) -> NodeType:
    kind, number = gpu(chance.choice(GPUS)), chance.choice((1, 1, 2, 4, 8))
    price = number * chance.choice((0.5, 1.0, 2.0, 4.0))
    return NodeType(
        cloud=chance.choice(tuple(Cloud)),
        node_type_id=name,
        gpu=kind,
        gpus=number,
        cores=chance.choice((4, 16, 96)),
        ram_bytes=number * chance.choice((12, 32, 128)) * GIB,
        nvme_bytes=chance.choice((0, 250, 4000)) * 10**9,
        network_bytes_per_second=chance.choice((1.25e9, 12.5e9, 50e9)),
        intra_node_bytes_per_second=chance.choice((kind.nvlink_bytes_per_second or 16e9, 16e9)),
        poor_network=chance.random() < 0.3,
        dbu_per_hour=chance.choice((price, price, price, None)),
        usd_per_dbu=0.15,
        on_demand_usd_per_hour=price,
        spot_usd_per_hour=chance.choice((None, price / 3, price / 3)),
        region="east",
        price_date="2026-07-20",
        source="made up",
        support=chance.choice((*4 * (Support.SUPPORTED,), Support.DBU_ONLY, Support.RETIRED)),
        notes="",
    )


def random_constraints(chance: random.Random) -> Constraints:
    """Loose ones, and tight ones of each kind."""
    return Constraints(
        min_nodes=chance.choice((1, 1, 1, 2)),
        max_nodes=chance.choice((2, 3, 4)),
        max_usd_per_hour=chance.choice((None, None, 4.0, 30.0)),
        budget_usd=chance.choice((None, None, 2.0, 50.0)),
        deadline_hours=chance.choice((None, None, 0.5, 10.0)),
        spot=chance.random() < 0.25,
        clouds=chance.choice((frozenset(), frozenset(), frozenset({Cloud.AWS, Cloud.GCP}))),
        min_compute_capability=chance.choice((None, None, None, (8, 0))),
    )
