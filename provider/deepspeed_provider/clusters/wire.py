# SPDX-License-Identifier: Apache-2.0
"""Candidates, refusals and node types as JSON: the one place where they become dicts."""

from __future__ import annotations

from typing import Any

from deepspeed_provider.clusters.candidate import Candidate, Setup
from deepspeed_provider.clusters.given import Fitted
from deepspeed_provider.clusters.given_plan import GivenPlan
from deepspeed_provider.clusters.gpu_plan import GpuPlan, Refused
from deepspeed_provider.clusters.job import Job
from deepspeed_provider.clusters.needs import Shortage
from deepspeed_provider.clusters.node_type import NodeType
from deepspeed_provider.clusters.reasons import Miss, OverLimits
from deepspeed_provider.clusters.throughput import Throughput

# What the search chooses among a job's options.
SETTINGS = (
    "precision",
    "zero_stage",
    "offload",
    "offload_device",
    "gradient_checkpointing",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "gpus_per_node",
    "nodes",
)


def throughput_as_json(found: Throughput) -> dict[str, Any]:
    """``mfu`` is a share; ``bound_by`` one of compute, communication and offload."""
    return {
        "tokens_per_second": found.tokens_per_second,
        "tokens_per_second_per_gpu": found.tokens_per_second_per_gpu,
        "mfu": found.mfu,
        "bound_by": found.bound_by.value,
    }


def candidate_as_json(found: Candidate) -> dict[str, Any]:
    """``nodes`` train; ``drivers`` are billed beside them."""
    node_type = found.node_type
    return {
        **_named(node_type),
        "region": node_type.region,
        "nodes": found.nodes,
        "drivers": found.drivers,
        "gpu": node_type.gpu.name,
        "gpus": found.nodes * node_type.gpus,
        "spot": found.spot,
        "usd": round(found.usd, 4),
        "usd_per_hour": round(found.usd_per_hour, 4),
        "price_date": node_type.price_date,
        "hours": round(found.hours, 4),
        "training_hours": round(found.training_hours, 4),
        **_setup(found),
    }


def _setup(found: Setup) -> dict[str, Any]:
    memory, hardware = found.memory, found.hardware
    return {
        "steps": found.steps,
        "throughput": throughput_as_json(found.throughput),
        "settings": {name: getattr(found.options, name) for name in SETTINGS},
        "memory": {
            "gpu_bytes": memory.gpu.total_bytes,
            "gpu_capacity_bytes": hardware.gpu.memory_bytes,
            "host_bytes": memory.host.total_bytes,
            "host_capacity_bytes": hardware.ram_bytes_per_node,
            "nvme_bytes": memory.nvme.total_bytes,
            "nvme_capacity_bytes": hardware.nvme_bytes_per_node,
        },
    }


def plan_as_json(found: GpuPlan) -> dict[str, Any]:
    """``chosen`` is the first of ``candidates``, or None; then ``nearest_miss`` says how close the job came."""
    choice, candidates = found.choice, [candidate_as_json(candidate) for candidate in found.choice.candidates]
    return {
        "objective": found.objective.value,
        **_job(found.job),
        "chosen": candidates[0] if candidates else None,
        "candidates": candidates,
        "rejected": [_refused(refused) for refused in found.refused],
        "nearest_miss": None if choice.nearest_miss is None else _miss(choice.nearest_miss),
        "would_fit": list(found.would_fit),
        "deepspeed_config": found.deepspeed_config,
        "cluster": found.cluster,
        "assumptions": list(found.assumptions),
        "warnings": list(found.warnings),
    }


def given_plan_as_json(found: GivenPlan) -> dict[str, Any]:
    """The keys of ``plan_as_json``, so that one reader serves both; nothing was searched, and nothing has to start."""
    fitted = found.fitted
    return {
        "objective": None,
        **_job(found.job),
        "chosen": _fitted(fitted) if isinstance(fitted, Fitted) else None,
        "candidates": [],
        "rejected": [],
        "nearest_miss": _shortage(fitted) if isinstance(fitted, Shortage) else None,
        "would_fit": [],
        "deepspeed_config": found.deepspeed_config,
        "cluster": None,
        "assumptions": list(found.assumptions),
        "warnings": list(found.warnings),
    }


def _fitted(found: Fitted) -> dict[str, Any]:
    """Prices are None where that of an hour is not known."""
    hardware = found.hardware
    return {
        "nodes": hardware.nodes,
        "gpu": hardware.gpu.name,
        "gpus": hardware.world_size,
        "usd": None if found.usd is None else round(found.usd, 4),
        "usd_per_hour": found.usd_per_hour,
        "hours": round(found.hours, 4),
        **_setup(found),
    }


def _job(job: Job) -> dict[str, Any]:
    return {
        "tokens": job.tokens,
        "steps": job.steps,
        "effective_batch_size": job.effective_batch_size,
        "sequence_length": job.options.sequence_length,
    }


def _shortage(found: Shortage) -> dict[str, Any]:
    return {
        "nodes": found.nodes,
        "settings": str(found.layout),
        "micro_batch_size": found.micro_batch_size,
        "reason": str(found),
        "resource": found.resource,
        "missing_bytes": found.missing_bytes,
    }


def _refused(found: Refused) -> dict[str, str]:
    return {
        "cloud": found.cloud.value,
        "node_type_id": found.node_type_id,
        "region": found.region,
        "reason": found.reason,
    }


def _miss(found: Miss | OverLimits) -> dict[str, Any]:
    """``resource`` and ``missing_bytes`` of what lacks memory; price and time of what breaks a limit."""
    if isinstance(found, Miss):
        return {**_named(found.node_type), **_shortage(found)}
    closest = found.candidate
    return {
        **_named(found.node_type),
        "nodes": closest.nodes,
        "settings": str(closest.layout),
        "micro_batch_size": closest.options.micro_batch_size,
        "reason": str(found),
        "usd": round(closest.usd, 4),
        "usd_per_hour": round(closest.usd_per_hour, 4),
        "hours": round(closest.hours, 4),
    }


def node_type_as_json(found: NodeType) -> dict[str, Any]:
    """One row of the catalogue; prices in USD, None where none is known."""
    return {
        **_named(found),
        "aliases": list(found.aliases),
        "gpu": found.gpu.name,
        "gpus": found.gpus,
        "gpu_memory_bytes": found.gpu.memory_bytes,
        "bf16": found.gpu.bf16,
        "cores": found.cores,
        "ram_bytes": found.ram_bytes,
        "nvme_bytes": found.nvme_bytes,
        "network_bytes_per_second": found.network_bytes_per_second,
        "poor_network": found.poor_network,
        "dbu_per_hour": found.dbu_per_hour,
        "usd_per_dbu": found.usd_per_dbu,
        "on_demand_usd_per_hour": found.on_demand_usd_per_hour,
        "spot_usd_per_hour": found.spot_usd_per_hour,
        "usd_per_hour": found.usd_per_hour() if found.priced() else None,
        "region": found.region,
        "price_date": found.price_date,
        "support": found.support.value,
        "source": found.source,
        "notes": found.notes,
    }


def _named(node_type: NodeType) -> dict[str, str]:
    return {"cloud": node_type.cloud.value, "node_type_id": node_type.node_type_id}
