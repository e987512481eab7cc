# SPDX-License-Identifier: Apache-2.0
"""What the fake workspace has: the node types of one cloud and the machine-learning runtimes of the catalogue."""

from __future__ import annotations

from typing import Any

from deepspeed_provider.clusters.node_type import NodeType
from deepspeed_provider.clusters.node_types import node_types
from deepspeed_provider.clusters.runtimes import runtimes

_CPU: dict[str, dict[str, Any]] = {
    "aws": {"node_type_id": "m5.xlarge", "memory_mb": 16384, "num_cores": 4.0},
    "azure": {"node_type_id": "Standard_D4ds_v5", "memory_mb": 16384, "num_cores": 4.0},
    "gcp": {"node_type_id": "n2-standard-4", "memory_mb": 16384, "num_cores": 4.0},
}

# Azure's own, and not in databricks-sdk: Azure/azure-databricks-client has them in its test of this answer.
_QUOTA = {"available_core_quota": 2000, "total_core_quota": 2000}


def node_types_of(cloud: str) -> list[dict[str, Any]]:
    """Entries of ``clusters/list-node-types``: the cloud's GPU types that can be launched, and one without a GPU.

    Raises ValueError for a cloud that is none.
    """
    if cloud not in _CPU:
        raise ValueError(f"cloud = {cloud!r}: use one of {', '.join(_CPU)}")
    return [_cpu(cloud), *(_entry(node) for node in node_types() if node.cloud == cloud and node.launchable)]


def spark_versions() -> list[dict[str, str]]:
    """Entries of ``clusters/spark-versions``: each runtime for GPUs, and the one of the same libraries without."""
    return [
        {
            "key": each.spark_version.replace("-gpu-", f"-{kind.lower()}-"),
            "name": f"{each.spark_version.split('.x')[0]} ML ({kind}, Apache Spark {each.spark})",
        }
        for kind in ("GPU", "CPU")
        for each in runtimes()
    ]


def _entry(node: NodeType) -> dict[str, Any]:
    entry = {
        "node_type_id": node.node_type_id,
        "instance_type_id": node.node_type_id,
        "description": node.node_type_id,
        "category": "GPU Accelerated",
        "memory_mb": node.ram_bytes // 2**20,
        "num_cores": float(node.cores),
        "num_gpus": node.gpus,
        "is_deprecated": False,
        "is_hidden": False,
        "node_instance_type": {
            "instance_type_id": node.node_type_id,
            "local_nvme_disks": int(node.nvme_bytes > 0),
            "local_nvme_disk_size_gb": node.nvme_bytes // 10**9,
        },
    }
    return {**entry, "node_info": dict(_QUOTA)} if node.cloud == "azure" else entry


def _cpu(cloud: str) -> dict[str, Any]:
    row = _CPU[cloud]
    return {
        **row,
        "instance_type_id": row["node_type_id"],
        "description": row["node_type_id"],
        "category": "General Purpose",
        "num_gpus": 0,
        "is_deprecated": False,
        "is_hidden": False,
    }
