# SPDX-License-Identifier: Apache-2.0
"""A candidate as ``new_cluster``, the body with which the Databricks Jobs API makes a cluster.

Field by field from the API's own description (databricks-sdk 0.162.0, ``ClusterSpec``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final

from deepspeed_provider.clusters.candidate import Candidate
from deepspeed_provider.clusters.node_type import Cloud, NodeType
from deepspeed_provider.clusters.runtimes import default_runtime, runtime
from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.sizing.options import Offload, OffloadDevice

# The nodes' own drives. Caches default to the root disk, which is small: a model fills it and the cluster crashes.
LOCAL_DISK: Final = "/local_disk0"
LIBAIO_SCRIPT_NAME: Final = "install_libaio.sh"
LIBAIO_SCRIPT: Final = """\
#!/bin/bash
# DeepSpeed compiles its asynchronous reads and writes against these headers when NVMe offload starts.
set -euo pipefail
apt-get update
apt-get install --yes --no-install-recommends libaio-dev
"""
# Volumes/<catalog>/<schema>/<volume>
VOLUME_SLASHES: Final = 3
MOST_TAGS: Final = 45
# Beside ResourceClass, which makes a single node.
_OWN_TAGS: Final = 1
# Google's labels; Amazon's tags, whose characters Azure takes too.
LONGEST_LABEL: Final = 63
LONGEST_TAG: Final = 256
_NOT_IN_LABELS: Final = re.compile(r"[^a-z0-9_-]")
_NOT_IN_TAGS: Final = re.compile(r"[^\w +=.:/@-]", re.ASCII)

# Of a general-purpose SSD; and how many one instance takes.
EBS_GIB: Final = (100, 4096)
MOST_EBS_VOLUMES: Final = 10
# For each parameter: downloaded (4), merged or saved (2), and a checkpoint of weights and states (14).
DISK_BYTES_PER_PARAMETER: Final = 20
DISK_BASE_GIB: Final = 100


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """The task instance for which a cluster is planned."""

    dag_id: str
    run_id: str
    task_id: str


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What a workspace decides about a cluster, and a plan does not. Empty is not given.

    Attributes:
        spark_version: key of a runtime; else the newest with long-term support.
        single_user_name: whose cluster it is (a user, a service principal, or a group); it must be the identity
            that the run has.
        log_volume: folder of a Volume for the logs of driver and executors.
        model_cache_volume: folder of a Volume where downloaded models stay from run to run; else they lie on the
            nodes' own drives.
        script_folder: folder of the workspace, or of a Volume, that holds :data:`LIBAIO_SCRIPT`.
        instance_pool_id, driver_instance_pool_id: pools, which then decide node type, zone, spot and disks.
        tags: any; they go before those of the run.
        run: adds the tags of :func:`run_tags`.
    """

    spark_version: str = ""
    single_user_name: str = ""
    log_volume: str = ""
    model_cache_volume: str = ""
    script_folder: str = "/Workspace/Shared/airflow-provider-deepspeed"
    instance_pool_id: str = ""
    driver_instance_pool_id: str = ""
    policy_id: str = ""
    tags: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    run: RunIdentity | None = None

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise SpecError(problems)


def run_tags(cloud: Cloud, run: RunIdentity) -> dict[str, str]:
    """Tags by which a bill leads back to the task, in characters and lengths that the cloud takes."""
    named = {"airflow_dag_id": run.dag_id, "airflow_run_id": run.run_id, "airflow_task_id": run.task_id}
    if cloud is Cloud.GCP:
        return {name: _NOT_IN_LABELS.sub("-", value.lower())[:LONGEST_LABEL] for name, value in named.items()}
    return {name: _NOT_IN_TAGS.sub("-", value)[:LONGEST_TAG] for name, value in named.items()}


def cluster_body(candidate: Candidate, settings: ClusterSettings | None = None) -> dict[str, Any]:
    """``new_cluster`` for a run of this candidate."""
    chosen = settings or ClusterSettings()
    found = runtime(chosen.spark_version) if chosen.spark_version else default_runtime(candidate.options.attention)
    body: dict[str, Any] = {
        "spark_version": found.spark_version,
        # Photon does not run on GPU nodes.
        "runtime_engine": "STANDARD",
        # The runtimes for machine learning exist for dedicated clusters only.
        "data_security_mode": "SINGLE_USER",
        "spark_env_vars": _cache_variables(chosen),
        **_shape(candidate, chosen),
        **_machines(candidate, chosen),
    }
    if needs_libaio(candidate):
        body["init_scripts"] = [_init_script(f"{chosen.script_folder.rstrip('/')}/{LIBAIO_SCRIPT_NAME}")]
    if chosen.single_user_name:
        body["single_user_name"] = chosen.single_user_name
    if chosen.log_volume:
        body["cluster_log_conf"] = {"volumes": {"destination": chosen.log_volume}}
    if chosen.policy_id:
        body["policy_id"] = chosen.policy_id
    return body


def needs_libaio(candidate: Candidate) -> bool:
    """Whether :data:`LIBAIO_SCRIPT` must lie in the script folder before the cluster starts."""
    options = candidate.options
    return options.offload is not Offload.NONE and options.offload_device is OffloadDevice.NVME


def _shape(candidate: Candidate, settings: ClusterSettings) -> dict[str, Any]:
    """One node: a driver that trains itself, without workers. Several: a driver, and workers that train."""
    tags = {**(run_tags(candidate.node_type.cloud, settings.run) if settings.run else {}), **settings.tags}
    if candidate.nodes == 1:
        return single_node(tags)
    # The distributor starts one barrier task for so many GPUs, and in it one process for each: one task a node.
    conf = {"spark.task.resource.gpu.amount": str(candidate.node_type.gpus)}
    return {"num_workers": candidate.nodes, "spark_conf": conf, **({"custom_tags": tags} if tags else {})}


def single_node(tags: Mapping[str, str]) -> dict[str, Any]:
    """The fields that make a cluster a driver alone."""
    conf = {"spark.databricks.cluster.profile": "singleNode", "spark.master": "local[*, 4]"}
    return {"num_workers": 0, "spark_conf": conf, "custom_tags": {**tags, "ResourceClass": "SingleNode"}}


def _machines(candidate: Candidate, settings: ClusterSettings) -> dict[str, Any]:
    if settings.instance_pool_id:
        driver = settings.driver_instance_pool_id or settings.instance_pool_id
        return {"instance_pool_id": settings.instance_pool_id, "driver_instance_pool_id": driver}
    name = candidate.node_type.node_type_id
    attributes = {Cloud.AWS: _aws, Cloud.AZURE: _azure, Cloud.GCP: _gcp}[candidate.node_type.cloud](candidate)
    return {
        "node_type_id": name,
        "driver_node_type_id": name,
        f"{candidate.node_type.cloud.value}_attributes": attributes,
        **({"enable_elastic_disk": True} if needs_libaio(candidate) else {}),
    }


def _first_on_demand(candidate: Candidate) -> int:
    """The driver of several nodes is kept when spot machines go; a single node is the driver, and was to be spot."""
    return 1 if candidate.nodes > 1 or not candidate.spot else 0


def _aws(candidate: Candidate) -> dict[str, Any]:
    # Left out, the availability would be spot with fallback.
    availability = "SPOT_WITH_FALLBACK" if candidate.spot else "ON_DEMAND"
    found: dict[str, Any] = {
        "availability": availability,
        "first_on_demand": _first_on_demand(candidate),
        "zone_id": "auto",
    }
    return found | _ebs_volumes(candidate.node_type, candidate.architecture.parameters)


def _azure(candidate: Candidate) -> dict[str, Any]:
    """Azure has no choice of zones."""
    found: dict[str, Any] = {
        "availability": "SPOT_WITH_FALLBACK_AZURE" if candidate.spot else "ON_DEMAND_AZURE",
        "first_on_demand": _first_on_demand(candidate),
    }
    return found | ({"spot_bid_max_price": -1} if candidate.spot else {})


def _gcp(candidate: Candidate) -> dict[str, Any]:
    return {
        "availability": "PREEMPTIBLE_WITH_FALLBACK_GCP" if candidate.spot else "ON_DEMAND_GCP",
        "first_on_demand": _first_on_demand(candidate),
        "zone_id": "AUTO",
    }


def _ebs_volumes(node_type: NodeType, parameters: int) -> dict[str, Any]:
    """Without an instance store, a cluster without volumes would be refused."""
    if node_type.nvme_bytes:
        return {}
    wanted = DISK_BASE_GIB + math.ceil(DISK_BYTES_PER_PARAMETER * parameters / 2**30)
    count = min(MOST_EBS_VOLUMES, math.ceil(wanted / EBS_GIB[1]))
    return {
        "ebs_volume_type": "GENERAL_PURPOSE_SSD",
        "ebs_volume_count": count,
        "ebs_volume_size": min(EBS_GIB[1], max(EBS_GIB[0], math.ceil(wanted / count))),
    }


def _cache_variables(settings: ClusterSettings) -> dict[str, str]:
    home = f"{LOCAL_DISK}/huggingface"
    return {
        "HF_HOME": home,
        "HF_HUB_CACHE": settings.model_cache_volume or f"{home}/hub",
        "HF_DATASETS_CACHE": f"{home}/datasets",
    }


def _init_script(path: str) -> dict[str, Any]:
    kind = "volumes" if path.startswith("/Volumes/") else "workspace"
    # The workspace's own paths do without its mount point.
    return {kind: {"destination": path.removeprefix("/Workspace")}}


def _problems(settings: ClusterSettings) -> list[FieldProblem]:
    problems = []
    for name in ("log_volume", "model_cache_volume"):
        path = getattr(settings, name)
        if path and (not path.startswith("/Volumes/") or path.strip("/").count("/") < VOLUME_SLASHES):
            works = "Use /Volumes/<catalog>/<schema>/<volume>, and a folder in it if you like."
            problems.append(_problem(name, path, "is no folder of a Volume", works))
    if not settings.script_folder.startswith(("/Workspace/", "/Volumes/")):
        works = "Use a folder below /Workspace or /Volumes."
        problems.append(_problem("script_folder", settings.script_folder, "cannot hold init scripts", works))
    if settings.driver_instance_pool_id and not settings.instance_pool_id:
        works = "Give instance_pool_id too."
        value = settings.driver_instance_pool_id
        problems.append(_problem("driver_instance_pool_id", value, "is a driver's pool without the workers'", works))
    most = MOST_TAGS - _OWN_TAGS - (len(fields(RunIdentity)) if settings.run else 0)
    if len(settings.tags) > most:
        works = f"Give at most {most}."
        problems.append(_problem("tags", len(settings.tags), "are more than Databricks takes", works))
    if settings.spark_version:
        try:
            runtime(settings.spark_version)
        except SpecError as error:
            problems += error.problems
    return problems


def _problem(name: str, value: object, problem: str, suggestion: str) -> FieldProblem:
    return FieldProblem(field=name, value=value, problem=problem, suggestion=suggestion)
