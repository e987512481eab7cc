# SPDX-License-Identifier: Apache-2.0
"""The whole plan of a job: which machines, why not others, and with what they are started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_provider.clusters.candidate import Candidate
from deepspeed_provider.clusters.cluster_body import (
    LIBAIO_SCRIPT_NAME,
    ClusterSettings,
    cluster_body,
    needs_libaio,
)
from deepspeed_provider.clusters.engine_settings import engine_settings, with_buckets
from deepspeed_provider.clusters.job import Constraints, Job, Objective
from deepspeed_provider.clusters.node_type import Cloud, NodeType, Tier
from deepspeed_provider.clusters.node_types import restricted
from deepspeed_provider.clusters.remedies import what_would_fit
from deepspeed_provider.clusters.runtimes import Runtime, runtime
from deepspeed_provider.clusters.search import Choice, search
from deepspeed_provider.clusters.statements import tier_assumptions, tier_warnings, training_warnings
from deepspeed_provider.deepspeed_config.generate import deepspeed_config
from deepspeed_provider.deepspeed_config.schema import schema
from deepspeed_provider.sizing.options import Method


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A node type that is not in the table, and why.

    Attributes:
        distance: orders types with like reasons by how close they came.
    """

    cloud: Cloud
    node_type_id: str
    region: str
    reason: str
    distance: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GpuPlan:
    """A choice with all that follows from it; ``deepspeed_config`` and ``cluster`` are None where nothing fits.

    Attributes:
        would_fit: where nothing fits, changes after which something does, each by itself.
        cluster: the body ``new_cluster`` of the Databricks Jobs API.
    """

    job: Job
    objective: Objective
    constraints: Constraints
    choice: Choice
    refused: tuple[Refused, ...]
    would_fit: tuple[str, ...]
    deepspeed_config: Mapping[str, Any] | None
    cluster: Mapping[str, Any] | None
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]


def gpu_plan(
    job: Job,
    node_types: Iterable[NodeType],
    constraints: Constraints,
    *,
    objective: Objective = Objective.COST,
    top: int = 10,
    workspace: Mapping[str, Any] | None = None,
    settings: ClusterSettings | None = None,
    tier: Tier = Tier.PREMIUM,
) -> GpuPlan:
    """``workspace``: its answer to list-node-types, to which the search is then restricted. ``tier``: by whose prices
    ``node_types`` are priced.

    Raises :class:`SpecError` for LoRA targets that the model does not have, for what is no such answer, and for an
    optimizer whose states would have to leave the GPU and cannot.
    """
    job = replace(job, options=with_buckets(job.architecture, job.options))
    listed = tuple(node_types)
    available, missing, warnings = _available(listed, workspace)
    choice = search(job, available, constraints, objective, top)
    best = choice.best
    cluster = None if best is None else cluster_body(best, settings)
    if best is not None and cluster is not None:
        warnings += [*_warnings(best), *_other_deepspeed(runtime(cluster["spark_version"]))]
    refused = [
        Refused(
            cloud=found.node_type.cloud,
            node_type_id=found.node_type.node_type_id,
            region=found.node_type.region,
            reason=found.reason,
            distance=found.distance,
        )
        for found in choice.rejections
    ]
    return GpuPlan(
        job=job,
        objective=objective,
        constraints=constraints,
        choice=choice,
        refused=(*refused, *missing),
        would_fit=() if best else what_would_fit(job, available, constraints),
        deepspeed_config=None if best is None else deepspeed_config(engine_settings(best)),
        cluster=cluster,
        assumptions=tuple(
            dict.fromkeys((*choice.assumptions, *tier_assumptions(tier), *(best.memory.assumptions if best else ())))
        ),
        warnings=tuple(dict.fromkeys((*warnings, *choice.warnings, *tier_warnings(choice.candidates, tier)))),
    )


def _available(
    listed: tuple[NodeType, ...], workspace: Mapping[str, Any] | None
) -> tuple[tuple[NodeType, ...], list[Refused], list[str]]:
    """What may be searched, what the workspace lacks, and what it says that the catalogue does not."""
    if workspace is None:
        return listed, [], []
    seen = restricted(listed, workspace)
    known = {node_type.node_type_id: node_type for node_type in listed}
    missing = []
    for name, reason in seen.missing.items():
        node_type = known.get(name)
        # Parts of a GPU are in no catalogue: they are Azure's.
        cloud, region = (Cloud.AZURE, "") if node_type is None else (node_type.cloud, node_type.region)
        missing.append(Refused(cloud=cloud, node_type_id=name, region=region, reason=reason))
    warnings = list(seen.warnings)
    if seen.unknown_gpu_types:
        names = ", ".join(seen.unknown_gpu_types)
        warnings.append(
            f"Not considered, as the catalogue has no row for them: {names}. A row of your own (catalog) adds one "
            "whose GPU `deepspeed-provider catalog show --gpus` lists."
        )
    return seen.available, missing, warnings


def _other_deepspeed(found: Runtime) -> list[str]:
    """Where the runtime's is not the one that configurations are written for and checked against."""
    ours = schema().version
    if found.deepspeed == ours:
        return []
    return [
        f"Runtime {found.spark_version} holds DeepSpeed {found.deepspeed} (by its list of {found.date}), and the "
        f"configuration is checked against {ours}: a task that needs that one pins deepspeed=={ours} as a library."
    ]


def _warnings(best: Candidate) -> list[str]:
    found = list(best.memory.warnings)
    if best.spot:
        found.append("Spot machines may be taken away: the run then starts again.")
    if needs_libaio(best):
        found.append(f"The script {LIBAIO_SCRIPT_NAME} must lie in the script folder before the cluster starts.")
    found += training_warnings(best)
    if best.options.method is not Method.FULL:
        packages = "peft and bitsandbytes" if best.options.method is Method.QLORA else "peft"
        found.append(
            f"No runtime of Databricks holds {packages}: the fine-tune's operator pins what it trains with, and a task "
            "of your own has to install it."
        )
    return found
