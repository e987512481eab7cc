# SPDX-License-Identifier: Apache-2.0
"""A small cluster without GPUs, on which a data set is prepared where nobody names another.

The workspace tells no prices of such machines: of those that are large enough, the one with the fewest cores and the
least memory is taken for the cheapest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deepspeed_provider.clusters.cluster_body import RunIdentity, run_tags, single_node
from deepspeed_provider.clusters.libraries import training_runtimes
from deepspeed_provider.clusters.node_type import Cloud
from deepspeed_provider.clusters.workspace import WorkspaceOffers
from deepspeed_provider.errors import SpecError

LEAST_CORES: Final = 4
# Of machines that are sold as 16 GB.
LEAST_MEMORY_MB: Final = 15 * 1024
EBS_GIB: Final = 100
WORKS: Final = "Give job={'existing_cluster_id': …} or job={'cluster': …}."


def cpu_cluster(offers: WorkspaceOffers, run: RunIdentity) -> dict[str, Any]:
    """``new_cluster`` of one machine, tagged as the run's. Raises :class:`SpecError` where the workspace has none."""
    node_type = _smallest(offers.node_types)
    cloud = _cloud(str(node_type["node_type_id"]))
    return {
        "spark_version": _runtime(offers),
        "runtime_engine": "STANDARD",
        # The runtimes for machine learning exist for dedicated clusters only.
        "data_security_mode": "SINGLE_USER",
        "node_type_id": node_type["node_type_id"],
        "driver_node_type_id": node_type["node_type_id"],
        f"{cloud.value}_attributes": _attributes(cloud, node_type),
        **single_node(run_tags(cloud, run)),
    }


def _smallest(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    fitting = [entry for entry in answer.get("node_types") or () if _fits(entry)]
    if not fitting:
        text = f"names no cluster, and this workspace has no machine without GPUs of {LEAST_CORES} cores and 16 GB"
        raise SpecError.of("job", None, text, WORKS)
    return min(
        fitting,
        key=lambda entry: (entry["num_cores"], entry["memory_mb"], not _has_disk(entry), entry["node_type_id"]),
    )


def _fits(entry: Mapping[str, Any]) -> bool:
    info = entry.get("node_info") or {}
    quota = info.get("available_core_quota")
    cores = entry.get("num_cores") or 0
    return (
        cores >= LEAST_CORES
        and (entry.get("memory_mb") or 0) >= LEAST_MEMORY_MB
        # There are no runtimes for machine learning for ARM, which is called so in every cloud.
        and not any(entry.get(name) for name in ("num_gpus", "is_graviton", "is_deprecated", "is_hidden"))
        and not info.get("status")
        and (quota is None or quota >= cores)
    )


def _has_disk(entry: Mapping[str, Any]) -> bool:
    instance = entry.get("node_instance_type") or {}
    return bool(instance.get("local_disks") or instance.get("local_nvme_disks"))


def _runtime(offers: WorkspaceOffers) -> str:
    """The newest with long-term support whose libraries the training knows, as it has a tokenizer to load."""
    keys = [found.spark_version.replace("-gpu-ml-", "-cpu-ml-") for found in training_runtimes()]
    key = next((key for key in keys if key in offers.spark_versions), None)
    if key is None:
        text = f"names no cluster, and this workspace has none of the runtimes {', '.join(keys)}"
        raise SpecError.of("job", None, text, WORKS)
    return key


def _cloud(node_type_id: str) -> Cloud:
    """By how each of them names its machines."""
    if node_type_id.startswith("Standard_"):
        return Cloud.AZURE
    return Cloud.AWS if "." in node_type_id else Cloud.GCP


def _attributes(cloud: Cloud, node_type: Mapping[str, Any]) -> dict[str, Any]:
    suffix = "" if cloud is Cloud.AWS else f"_{cloud.value.upper()}"
    # Left out, it would be spot with fallback on some.
    found: dict[str, Any] = {"availability": f"ON_DEMAND{suffix}", "first_on_demand": 1}
    if cloud is Cloud.AWS and not _has_disk(node_type):
        # Without an instance store, a cluster without volumes would be refused.
        found |= {"ebs_volume_type": "GENERAL_PURPOSE_SSD", "ebs_volume_count": 1, "ebs_volume_size": EBS_GIB}
    return found
