# SPDX-License-Identifier: Apache-2.0
"""The machine that a data set is prepared on where nobody names one."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_provider.clusters.cluster_body import RunIdentity
from deepspeed_provider.clusters.cpu_cluster import cpu_cluster
from deepspeed_provider.clusters.workspace import WorkspaceOffers
from deepspeed_provider.errors import SpecError
from deepspeed_provider.testing.offers import node_types_of, spark_versions

RUN = RunIdentity(dag_id="dag", run_id="manual__2026-11-30", task_id="prepare")
ALL_RUNTIMES = frozenset(entry["key"] for entry in spark_versions())


def offers(*node_types: dict[str, Any], versions: frozenset[str] = ALL_RUNTIMES) -> WorkspaceOffers:
    return WorkspaceOffers(node_types={"node_types": list(node_types)}, spark_versions=versions)


def machine(name: str, cores: float = 4.0, gb: int = 16, **fields: Any) -> dict[str, Any]:
    return {"node_type_id": name, "num_cores": cores, "memory_mb": gb * 1024, "num_gpus": 0, **fields}


@pytest.mark.parametrize(
    ("cloud", "attributes"),
    [
        (
            "aws",
            {
                "aws_attributes": {
                    "availability": "ON_DEMAND",
                    "first_on_demand": 1,
                    "ebs_volume_type": "GENERAL_PURPOSE_SSD",
                    "ebs_volume_count": 1,
                    "ebs_volume_size": 100,
                }
            },
        ),
        ("azure", {"azure_attributes": {"availability": "ON_DEMAND_AZURE", "first_on_demand": 1}}),
        ("gcp", {"gcp_attributes": {"availability": "ON_DEMAND_GCP", "first_on_demand": 1}}),
    ],
)
def test_one_machine_of_each_cloud(cloud: str, attributes: dict[str, Any]) -> None:
    node_types = node_types_of(cloud)
    found = cpu_cluster(offers(*node_types), RUN)
    assert found["node_type_id"] == found["driver_node_type_id"] == node_types[0]["node_type_id"]
    assert found["spark_version"] == "17.3.x-cpu-ml-scala2.13"
    assert found["num_workers"] == 0
    assert found["spark_conf"]["spark.databricks.cluster.profile"] == "singleNode"
    assert found["custom_tags"]["ResourceClass"] == "SingleNode"
    assert found["custom_tags"]["airflow_task_id"] == "prepare"
    assert {name: found[name] for name in attributes} == attributes


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        pytest.param([machine("m5.large", cores=2, gb=8)], "m5.2xlarge", id="too few cores"),
        pytest.param([machine("c5.xlarge", gb=8)], "m5.2xlarge", id="too little memory"),
        pytest.param([machine("g4dn.xlarge", num_gpus=1)], "m5.2xlarge", id="a GPU"),
        pytest.param([machine("m6g.xlarge", is_graviton=True)], "m5.2xlarge", id="ARM"),
        pytest.param([machine("m4.xlarge", is_deprecated=True)], "m5.2xlarge", id="deprecated"),
        pytest.param([machine("m3.xlarge", is_hidden=True)], "m5.2xlarge", id="hidden"),
        pytest.param(
            [machine("m5.xlarge", node_info={"status": ["NotAvailableInRegion"]})], "m5.2xlarge", id="elsewhere"
        ),
        pytest.param([machine("m5.xlarge", node_info={"available_core_quota": 2})], "m5.2xlarge", id="no quota"),
        pytest.param([machine("m5.xlarge")], "m5.xlarge", id="smaller"),
        pytest.param([machine("r5.xlarge", gb=32), machine("m5.xlarge")], "m5.xlarge", id="less memory"),
        pytest.param(
            [machine("m5.xlarge"), machine("m5d.xlarge", node_instance_type={"local_nvme_disks": 1})],
            "m5d.xlarge",
            id="with a disk of its own",
        ),
    ],
)
def test_the_smallest_that_is_large_enough(others: list[dict[str, Any]], chosen: str) -> None:
    found = cpu_cluster(offers(machine("m5.2xlarge", cores=8, gb=32), *others), RUN)
    assert found["node_type_id"] == chosen
    assert ("ebs_volume_count" in found["aws_attributes"]) is (chosen != "m5d.xlarge")


def test_the_newest_runtime_that_the_workspace_has() -> None:
    versions = frozenset(key for key in ALL_RUNTIMES if not key.startswith("17."))
    assert cpu_cluster(offers(machine("m5.xlarge"), versions=versions), RUN)["spark_version"] == (
        "16.4.x-cpu-ml-scala2.12"
    )


@pytest.mark.parametrize(
    ("offered", "text"),
    [
        pytest.param(
            offers(machine("m5.large", cores=2)), "has no machine without GPUs of 4 cores and 16 GB", id="type"
        ),
        pytest.param(
            offers(machine("m5.xlarge"), versions=frozenset({"15.4.x-cpu-ml-scala2.12"})),
            "has none of the runtimes 17.3.x-cpu-ml-scala2.13, 16.4.x-cpu-ml-scala2.12",
            id="runtime",
        ),
    ],
)
def test_a_workspace_without_any_says_what_would_work(offered: WorkspaceOffers, text: str) -> None:
    with pytest.raises(SpecError) as caught:
        cpu_cluster(offered, RUN)
    assert text in str(caught.value)
    assert "job={'existing_cluster_id': …} or job={'cluster': …}" in str(caught.value)
