# SPDX-License-Identifier: Apache-2.0
"""The catalogue seen from one workspace, by its saved answer."""

from __future__ import annotations

import pytest
from deepspeed_provider.clusters.node_types import node_types, restricted
from deepspeed_provider.errors import SpecError

# The one body of a real workspace that was found in public: a CPU type on Azure, with its core quota.
CPU = {
    "node_type_id": "Standard_L80s_v2",
    "memory_mb": 655360,
    "num_cores": 80,
    "num_gpus": 0,
    "is_deprecated": False,
    "is_hidden": False,
    "node_info": {"available_core_quota": 350, "total_core_quota": 350},
}


def entry(node_type_id: str, num_gpus: int | None = 8, **fields) -> dict:
    return {"node_type_id": node_type_id, "num_gpus": num_gpus, **fields}


def ids(found) -> list[str]:
    return [node.node_type_id for node in found.available]


def test_only_what_is_there_is_available():
    found = restricted(node_types(), {"node_types": [CPU, entry("p4d.24xlarge"), entry("g5.xlarge", 1)]})
    assert ids(found) == ["g5.xlarge", "p4d.24xlarge"]
    assert found.missing["p5.48xlarge"] == "not in this workspace"
    assert len(found.missing) == 78
    assert found.unknown_gpu_types == ()
    assert found.warnings == ()


def test_ids_are_spelled_as_the_workspace_spells_them():
    answer = {"node_types": [entry("standard_nd96isr_h100_V5"), entry("Standard_NC80ads_H100_V5", 2)]}
    assert sorted(ids(restricted(node_types(), answer))) == ["Standard_NC80ads_H100_V5", "standard_nd96isr_h100_V5"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"is_deprecated": True}, "deprecated in this workspace"),
        ({"is_hidden": True}, "hidden in this workspace"),
        ({"node_info": {"status": ["NotAvailableInRegion"]}}, "not available in this workspace's region"),
        ({"node_info": {"status": ["NotEnabledOnSubscription"]}}, "not enabled on this workspace's subscription"),
        ({"node_info": {"status": ["Strange"]}}, "Strange"),
        (
            {"node_info": {"available_core_quota": 95, "total_core_quota": 100}},
            "needs 96 cores of quota, 95 are left of 100",
        ),
        (
            {"is_hidden": True, "node_info": {"status": ["NotAvailableInRegion"], "available_core_quota": 0}},
            "not available in this workspace's region; hidden in this workspace; "
            "needs 96 cores of quota, 0 are left of ?",
        ),
    ],
)
def test_why_a_type_that_is_there_cannot_be_had(fields, reason):
    found = restricted(node_types(), {"node_types": [entry("Standard_ND96asr_v4", **fields)]})
    assert found.available == ()
    assert found.missing["Standard_ND96asr_v4"] == reason


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"node_info": None},
        {"node_info": {}},
        {"node_info": {"status": []}},
        {"node_info": {"available_core_quota": 96}},
    ],
)
def test_nothing_against_it(fields):
    assert ids(restricted(node_types(), {"node_types": [entry("Standard_ND96asr_v4", **fields)]}))


def test_gpu_types_that_the_catalogue_does_not_know_are_reported():
    answer = {"node_types": [entry("p6-b200.48xlarge"), entry("g7.xlarge", 1), CPU, entry("i3.xlarge", None)]}
    assert restricted(node_types(), answer).unknown_gpu_types == ("g7.xlarge", "p6-b200.48xlarge")


def test_parts_of_a_gpu_are_known_and_refused():
    found = restricted(node_types(), {"node_types": [entry("Standard_NV12ads_A10_V5", 1)]})
    assert found.unknown_gpu_types == ()
    assert found.missing["Standard_NV12ads_A10_V5"] == "has a third of an A10, with 8 GB"


def test_another_count_of_gpus_is_a_warning():
    found = restricted(node_types(), {"node_types": [entry("Standard_NC48ads_A100_v4", 1)]})
    assert found.available[0].gpus == 2
    assert found.warnings == ("Standard_NC48ads_A100_v4: this workspace counts 1 GPUs, the catalogue 2",)


@pytest.mark.parametrize("answer", [{}, {"node_types": {}}, {"error_code": "403"}, []], ids=str)
def test_what_is_no_answer(answer):
    with pytest.raises(SpecError, match="is no answer of list-node-types"):
        restricted(node_types(), answer)


@pytest.mark.parametrize(
    ("quota", "machines", "nodes"),
    [(None, None, 4), (96, 1, 1), (191, 1, 1), (192, 2, 1), (288, 3, 2), (480, 5, 4), (9600, 100, 4)],
)
def test_a_quota_bounds_machines_of_which_several_need_a_driver(quota, machines, nodes):
    fields = {} if quota is None else {"node_info": {"available_core_quota": quota}}
    (found,) = restricted(node_types(), {"node_types": [entry("Standard_ND96asr_v4", **fields)]}).available
    assert found.most_machines == machines
    assert found.most_nodes(4) == nodes
