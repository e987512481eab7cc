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
        problems = _python(request, cluster, "job.cluster.spark_version")
    else:
        try:
            cluster = dict(look(cluster_id))
            problems = _state(cluster_id, cluster) or _runtime(request, cluster_id, cluster)
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


def _runtime(request: RunRequest, cluster_id: str, cluster: Mapping[str, Any]) -> list[FieldProblem]:
    version = _version(cluster)
    # Only the runtimes for machine learning hold DeepSpeed and the GPUs' libraries. One that is not told is not judged.
    if version and request.use_gpu and "-gpu-ml-" not in version and not cluster.get("use_ml_runtime"):
        works = f"Take a cluster with a GPU runtime for machine learning, such as {default_runtime().spark_version}."
        return [_existing(cluster_id, f"has the runtime {version}", works)]
    return _python(request, cluster, "job.existing_cluster_id")


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
