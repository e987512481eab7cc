# SPDX-License-Identifier: Apache-2.0
"""The cluster that a plan chose, as what a run is submitted with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from deepspeed_provider.backends.jobs_body import JobSettings
from deepspeed_provider.clusters.cluster_body import RunIdentity, run_tags
from deepspeed_provider.clusters.libraries import require_training, task_libraries
from deepspeed_provider.clusters.node_type import Cloud
from deepspeed_provider.errors import SpecError
from deepspeed_provider.handed_plan import AUTO, HandedPlan

# In place of a plan's cluster.
OWN_CLUSTER: Final = ("cluster", "existing_cluster_id")


def own_cluster(job: Mapping[str, Any] | None) -> str | None:
    """The field of ``job`` that names a cluster of the user's own."""
    return next((name for name in OWN_CLUSTER if (job or {}).get(name)), None)


def require_cluster(job: Mapping[str, Any] | None, plan: object) -> None:
    """Raises :class:`SpecError` where nothing says on which cluster to run, or two things do."""
    own = own_cluster(job)
    if own is None and plan is None:
        text = "names no cluster, and there is no plan"
        works = "Give plan='auto', a plan of GpuPlanOperator, or job with 'existing_cluster_id' or 'cluster'."
        raise SpecError.of("job", job, text, works)
    if own is not None and plan == AUTO:
        text = f"chooses a cluster, and job names one ({own})"
        works = "Leave one of them out. An operator plans for that cluster with plan_options={'hardware': …}."
        raise SpecError.of("plan", plan, text, works)


def require_trainable(plan: HandedPlan) -> None:
    """Raises :class:`SpecError` for a plan without a cluster, or with a runtime on which the training does not run."""
    if plan.cluster is None:
        text = "is for hardware that is there, and names no cluster"
        works = "Give job={'existing_cluster_id': …} beside it."
        raise SpecError.of("plan", str(plan.chosen), text, works)
    require_training(str(plan.cluster.get("spark_version", "")), "plan.cluster.spark_version")


def on_planned_cluster(settings: JobSettings, plan: HandedPlan, run: RunIdentity) -> JobSettings:
    """``settings`` with the plan's cluster, which is tagged as this run's."""
    cluster = dict(plan.cluster or {})
    if plan.chosen.cloud:
        cluster["custom_tags"] = {**cluster.get("custom_tags", {}), **run_tags(Cloud(plan.chosen.cloud), run)}
    return replace(settings, cluster=cluster)


def with_libraries(settings: JobSettings, method: str) -> JobSettings:
    """``settings`` with what the new cluster's runtime lacks for a training by ``method``.

    A package that the user names stays the user's. A cluster that is there is left as it is: others use it too.
    """
    cluster = settings.cluster or {}
    needed = task_libraries(str(cluster.get("spark_version", "")), method)
    named = _packages(settings.libraries)
    ours = [library for library in needed if not named & _packages([library])]
    return replace(settings, libraries=(*ours, *settings.libraries))


def _packages(libraries: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of those from a package index; ``peft[extra]==0.15.2`` is peft."""
    asked = [str((library.get("pypi") or {}).get("package", "")).strip() for library in libraries]
    names = [re.split(r"[^\w.-]", package, maxsplit=1)[0] for package in asked if package]
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}
