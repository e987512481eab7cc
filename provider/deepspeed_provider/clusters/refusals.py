# SPDX-License-Identifier: Apache-2.0
"""Why a node type is not taken, before anything is sized."""

from __future__ import annotations

from deepspeed_provider.clusters.job import Constraints, Job
from deepspeed_provider.clusters.node_type import NodeType, Support
from deepspeed_provider.clusters.settings import node_counts
from deepspeed_provider.sizing.options import Attention

# Of flash-attn 2 (its README: Ampere, Ada or Hopper GPUs).
FLASH_COMPUTE_CAPABILITY = (8, 0)
_SUPPORT = {
    Support.RETIRED: "retired: Databricks no longer launches it",
    Support.NO_EVIDENCE: "Databricks does not name it among its node types",
}


def refusal(job: Job, node_type: NodeType, constraints: Constraints) -> str | None:
    """One reason in words; None where it may be tried."""
    if not node_type.launchable:
        return _SUPPORT.get(node_type.support, "cannot be launched")
    if _elsewhere(node_type, constraints):
        return _place(node_type, constraints)
    if _not_asked_for(node_type, constraints):
        return "not among the node types asked for"
    if _too_old(job, node_type, constraints):
        return _generation(job, node_type, constraints)
    if not node_type.priced(spot=constraints.spot):
        return _unpriced(constraints)
    return None if _divides(job, node_type, constraints) else _division(job, node_type, constraints)


def _elsewhere(node_type: NodeType, constraints: Constraints) -> bool:
    if constraints.clouds and node_type.cloud not in constraints.clouds:
        return True
    return bool(constraints.regions) and node_type.region not in constraints.regions


def _place(node_type: NodeType, constraints: Constraints) -> str:
    asked = ", ".join(sorted({*(cloud.value for cloud in constraints.clouds), *constraints.regions}))
    return f"on {node_type.cloud} in {node_type.region}, not in {asked}"


def _not_asked_for(node_type: NodeType, constraints: Constraints) -> bool:
    if constraints.node_type_ids and not any(map(node_type.named, constraints.node_type_ids)):
        return True
    begins = tuple(family.casefold() for family in constraints.families)
    return bool(begins) and not node_type.node_type_id.casefold().startswith(begins)


def _too_old(job: Job, node_type: NodeType, constraints: Constraints) -> bool:
    least = max(constraints.min_compute_capability or (0, 0), _for_kernels(job))
    return node_type.gpu.compute_capability < least


def _for_kernels(job: Job) -> tuple[int, int]:
    return FLASH_COMPUTE_CAPABILITY if job.options.attention is Attention.FLASH else (0, 0)


def _generation(job: Job, node_type: NodeType, constraints: Constraints) -> str:
    asked, needed = constraints.min_compute_capability or (0, 0), _for_kernels(job)
    bf16 = "" if node_type.gpu.bf16 else ", no bf16"
    has, least = (".".join(map(str, version)) for version in (node_type.gpu.compute_capability, max(asked, needed)))
    who = f"at least {least} is asked for" if asked >= needed else f"flash attention needs at least {least}"
    return f"{node_type.gpu.name} has compute capability {has}{bf16}; {who}"


def _unpriced(constraints: Constraints) -> str:
    kind, column = ("spot", "spot") if constraints.spot else ("on-demand", "on_demand")
    return f"no known {kind} price; a row of your own gives one (catalog, {column}_usd_per_hour)"


def _divides(job: Job, node_type: NodeType, constraints: Constraints) -> bool:
    most = node_type.most_nodes(constraints.max_nodes)
    counts = node_counts(job, node_type.gpus, least=constraints.min_nodes, most=most)
    return next(counts, None) is not None


def _division(job: Job, node_type: NodeType, constraints: Constraints) -> str:
    nodes = f"{constraints.min_nodes} to {node_type.most_nodes(constraints.max_nodes)}"
    return (
        f"an effective batch of {job.effective_batch_size} does not divide over {nodes} nodes "
        f"of {node_type.gpus} GPU{'s' if node_type.gpus > 1 else ''}"
    )
