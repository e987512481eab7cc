# SPDX-License-Identifier: Apache-2.0
"""Whether a run can work on the cluster that it names; asked before anything is submitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from deepspeed_provider.backends.base import RunRequest
from deepspeed_provider.backends.jobs_body import JobSettings
from deepspeed_provider.backends.workspace_wire import WireRefused
from deepspeed_provider.clusters.runtimes import default_runtime, runtimes
from deepspeed_provider.errors import FieldProblem, SpecError

# Of clusters/get; any other state is one that runs, or soon will.
ENDED: Final = ("TERMINATING", "TERMINATED", "ERROR")
UNKNOWN: Final = (400, 403, 404)


def require_fit(request: RunRequest, settings: JobSettings, look: Callable[[str], Mapping[str, Any]]) -> None:
    """Raises :class:`SpecError` for a cluster that is not there, not running, or has another runtime than needed.

    Args:
        look: ``clusters/get`` by the cluster's id.
    """
    cluster_id = settings.existing_cluster_id
    if cluster_id is None:
        cluster = {**(settings.cluster or {}), **settings.cluster_fields}
        problems = [
            *_runtime(request, cluster, "job.cluster.spark_version"),
            *([] if request.on_driver else _machines(request, cluster)),
        ]
    else:
        try:
            cluster = dict(look(cluster_id))
            problems = _state(cluster_id, cluster) or [
                *_runtime(request, cluster, "job.existing_cluster_id", cluster_id),
                *([] if request.on_driver else _room(request, cluster, cluster_id)),
            ]
        except WireRefused as refused:
            if refused.status not in UNKNOWN:
                raise
            problems = [_existing(cluster_id, f"cannot be used: {refused}", "Give the id of a cluster that is there.")]
    if problems:
        raise SpecError(problems)


def _state(cluster_id: str, cluster: Mapping[str, Any]) -> list[FieldProblem]:
    if cluster.get("state") not in ENDED:
        return []
    reason = (cluster.get("termination_reason") or {}).get("code")
    told = f"is {cluster['state']}" + (f" ({reason})" if reason else "")
    works = "Start it first, or leave it out: with job={'cluster': …} the run gets a cluster of its own."
    return [_existing(cluster_id, told, works)]


def _runtime(
    request: RunRequest, cluster: Mapping[str, Any], place: str, cluster_id: str | None = None
) -> list[FieldProblem]:
    version = _version(cluster)
    # Only the runtimes for machine learning hold DeepSpeed and the GPUs' libraries, unless an image of the user's own
    # does. One that is not told is not judged.
    trains = "-gpu-ml-" in version or cluster.get("use_ml_runtime") or cluster.get("docker_image")
    if version and request.use_gpu and not trains:
        works = f"Take a GPU runtime for machine learning, such as {default_runtime().spark_version}."
        problem = "is no GPU runtime for machine learning" if cluster_id is None else f"has the runtime {version}"
        return [FieldProblem(field=place, value=cluster_id or version, problem=problem, suggestion=works)]
    return _python(request, cluster, place)


def _machines(request: RunRequest, cluster: Mapping[str, Any]) -> list[FieldProblem]:
    """Of a cluster that is made for the run. One machine is a driver alone; of several the workers train."""
    problems = []
    workers = cluster.get("num_workers")
    wanted = 0 if request.nodes == 1 else request.nodes
    if workers is not None and workers != wanted and not cluster.get("autoscale"):
        text = f"does not go with nodes = {request.nodes}, which is {wanted or 'no'} workers"
        works = f"Give {wanted}, or other nodes."
        problems.append(FieldProblem(field="job.cluster.num_workers", value=workers, problem=text, suggestion=works))
    node_type = str(cluster.get("node_type_id") or "")
    gpus = _gpus_of(node_type) if request.use_gpu else None
    if gpus is not None and gpus < request.gpus_per_node:
        text = f"has {gpus} GPUs, and {request.gpus_per_node} ranks are to run on each node"
        works = "Take a larger node type, fewer ranks, or more nodes."
        problems.append(FieldProblem(field="job.cluster.node_type_id", value=node_type, problem=text, suggestion=works))
    return problems


def _room(request: RunRequest, cluster: Mapping[str, Any], cluster_id: str) -> list[FieldProblem]:
    """Of a cluster that is there, as far as it tells; one that is larger than needed does."""
    problems, works = [], "Name another cluster, or ask for what this one has."
    most = (cluster.get("autoscale") or {}).get("max_workers", cluster.get("num_workers"))
    if most is not None and request.nodes > 1 and most < request.nodes:
        problems.append(_existing(cluster_id, f"has {most} workers, and nodes = {request.nodes} train", works))
    worker = str(cluster.get("node_type_id") or "")
    node_type = worker if request.nodes > 1 else str(cluster.get("driver_node_type_id") or worker)
    gpus = _gpus_of(node_type) if request.use_gpu else None
    if gpus is not None and gpus < request.gpus_per_node:
        text = f"has {gpus} GPUs on each {node_type}, and {request.gpus_per_node} ranks are to run on each node"
        problems.append(_existing(cluster_id, text, works))
    return problems


def _gpus_of(node_type_id: str) -> int | None:
    """Of a node type that the catalogue knows."""
    from deepspeed_provider.clusters.node_types import node_types

    return next((each.gpus for each in node_types() if each.node_type_id == node_type_id), None)


def _python(request: RunRequest, cluster: Mapping[str, Any], place: str) -> list[FieldProblem]:
    """A pickle of one minor version is read by that one only. Unknown runtimes are judged where they run."""
    version = _version(cluster)
    found = next((each for each in runtimes() if each.spark_version == version), None)
    if not request.python or found is None or found.python == request.python:
        return []
    fitting = [each.spark_version for each in runtimes() if each.python == request.python and each.has_distributor]
    runtime = (
        f"take a runtime with Python {request.python} ({', '.join(fitting)})" if fitting else "use its Python here"
    )
    problem = FieldProblem(
        field=place,
        value=version,
        problem=f"has Python {found.python}, and the function was pickled by Python {request.python}",
        suggestion=f"Give the function by name, as 'module:function', with code; or {runtime}.",
    )
    return [problem]


def _version(cluster: Mapping[str, Any]) -> str:
    return str(cluster.get("effective_spark_version") or cluster.get("spark_version") or "")


def _existing(cluster_id: str, problem: str, suggestion: str) -> FieldProblem:
    return FieldProblem(field="job.existing_cluster_id", value=cluster_id, problem=problem, suggestion=suggestion)
