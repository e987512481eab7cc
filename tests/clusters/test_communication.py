# SPDX-License-Identifier: Apache-2.0
"""ZeRO's volumes by stage, and what offload moves, counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
from deepspeed_provider.clusters.calibration import CALIBRATION
from deepspeed_provider.clusters.communication import communication, ring_seconds
from deepspeed_provider.clusters.gpus import GIB, gpu
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.node_types import node_types
from deepspeed_provider.clusters.offload import offload_time
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import parse_options
from deepspeed_provider.sizing.weights import weights

MODEL = architecture(model_config("meta-llama/Meta-Llama-3-8B"))
P = MODEL.parameters
# Round numbers: no latency, links that reach all of their rate.
IDEAL = dataclasses.replace(CALIBRATION, network=1.0, pcie=1.0, collective_seconds=0.0)
LINK, NETWORK = 100e9, 50e9


def hardware(gpus_per_node: int = 8, nodes: int = 1, **fields) -> Hardware:
    return Hardware(
        gpu=gpu("A100-80GB"),
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        intra_node_bytes_per_second=LINK,
        inter_node_bytes_per_second=NETWORK,
        **{"ram_bytes_per_node": 1024 * GIB, "nvme_bytes_per_node": 0, "cores_per_node": 100, **fields},
    )


@pytest.mark.parametrize(
    ("gpus_per_node", "nodes", "seconds"),
    [
        (1, 1, 0),
        (8, 1, 7 / 8 * 100 / 100),
        (8, 2, 15 / 16 * 100 / 50),
        (1, 2, 1 / 2 * 100 / 50),
    ],
    ids=["one GPU", "one node", "two nodes", "two GPUs on two nodes"],
)
def test_a_ring(gpus_per_node, nodes, seconds):
    assert ring_seconds(100e9, hardware(gpus_per_node, nodes), IDEAL) == pytest.approx(seconds)


def test_a_ring_goes_at_the_rate_of_its_slowest_link():
    slow_inside = dataclasses.replace(hardware(8, 2), intra_node_bytes_per_second=10e9)
    assert ring_seconds(100e9, slow_inside, IDEAL) == pytest.approx(15 / 16 * 10)


RING = 7 / 8 / LINK


@pytest.mark.parametrize(
    ("values", "overlapped", "waited"),
    [
        ({"zero_stage": 0}, 0, 2 * 2 * P),
        ({"zero_stage": 0, "gradient_accumulation_steps": 4}, 0, 2 * 2 * P),
        ({"zero_stage": 1, "gradient_accumulation_steps": 4}, 0, 2 * P + 2 * P),
        ({"zero_stage": 2, "gradient_accumulation_steps": 4}, 0, 4 * 2 * P + 2 * P),
        ({"zero_stage": 2, "gradient_accumulation_steps": 4, "overlap_comm": True}, 4 * 2 * P, 2 * P),
        ({"zero_stage": 3}, 3 * 2 * P, 0),
        ({"zero_stage": 3, "gradient_accumulation_steps": 4}, 4 * 3 * 2 * P, 0),
        ({"zero_stage": 3, "precision": "fp32"}, 3 * 4 * P, 0),
    ],
    ids=lambda value: " ".join(f"{name}={item}" for name, item in value.items()) if isinstance(value, dict) else None,
)
def test_volumes_by_stage(values, overlapped, waited):
    options = parse_options({"gpus_per_node": 8, **values})
    found = communication(MODEL.num_layers, weights(MODEL, options), options, hardware(), IDEAL)
    assert found.overlapped == pytest.approx(overlapped * RING)
    assert found.waited == pytest.approx(waited * RING)


def test_lora_sends_adapters_but_stage_3_gathers_everything():
    times = {}
    for stage in (2, 3):
        options = parse_options({"gpus_per_node": 8, "method": "lora", "zero_stage": stage})
        found = weights(MODEL, options)
        times[stage] = communication(MODEL.num_layers, found, options, hardware(), IDEAL)
        if stage == 2:
            assert times[2].waited == pytest.approx(2 * found.widths.weight * found.trained * RING)
    assert times[3].overlapped == pytest.approx((2 * 2 * P + 3 * found.widths.weight * found.trained) * RING)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"zero_stage": 3}, {}),
        (
            {"zero_stage": 2, "offload": "optimizer"},
            {"pcie": 2 * P / 8 / 31.5e9, "waited_pcie": 2 * P / 8 / 31.5e9, "cpu_optimizer": P / 4e9},
        ),
        (
            {"zero_stage": 3, "offload": "all", "gradient_accumulation_steps": 2},
            {
                "pcie": 2 * (2 + 4) * P / 8 / 31.5e9,
                "waited_pcie": 2 * P / 8 / 31.5e9,
                "cpu_optimizer": P / 4e9,
            },
        ),
        ({"zero_stage": 3, "offload": "parameters"}, {"pcie": 4 * P / 8 / 31.5e9}),
        (
            {"zero_stage": 3, "offload": "all", "offload_device": "nvme"},
            {
                "pcie": 6 * P / 8 / 31.5e9,
                "waited_pcie": 2 * P / 8 / 31.5e9,
                "cpu_optimizer": P / 4e9,
                "nvme": 4 * P / 16e9,
                "waited_nvme": 12 * P / 16e9 + (12 + 2) * P / 8e9 - P / 4e9,
            },
        ),
    ],
    ids=["none", "optimizer", "all, accumulated", "parameters", "nvme"],
)
def test_what_offload_costs(values, expected):
    options = parse_options({"gpus_per_node": 8, **values})
    found = offload_time(weights(MODEL, options), options, hardware(nvme_bytes_per_node=8 * 10**12), IDEAL)
    assert dataclasses.asdict(found) == pytest.approx(
        {"pcie": 0, "nvme": 0, "waited_pcie": 0, "waited_nvme": 0, "cpu_optimizer": 0, **expected}
    )


def test_hardware_of_a_node_type():
    (node,) = (node for node in node_types() if node.node_type_id == "g5.48xlarge")
    found = Hardware.of(node, 3)
    assert (found.world_size, found.gpus_per_node, found.nodes) == (24, 8, 3)
    assert found.ram_bytes_per_node == 768 * GIB
    assert found.inter_node_bytes_per_second == 100e9 / 8
    # The GPUs of this node have half a slot each, to each other and to the host.
    assert found.pcie_bytes_per_second == found.intra_node_bytes_per_second == 15.75e9
    assert hardware().pcie_bytes_per_second == 31.5e9


def test_hardware_that_is_described():
    found = Hardware.given(gpu=gpu("A100-40GB"), gpus_per_node=8, nodes=2, interconnect_gbps=1600)
    assert found.intra_node_bytes_per_second == 300e9
    assert found.inter_node_bytes_per_second == 200e9
    assert (found.cores_per_node, found.ram_bytes_per_node, found.nvme_bytes_per_node) == (96, 768 * GIB, 0)
    without = Hardware.given(gpu=gpu("L4"), gpus_per_node=1, ram_bytes_per_node=16 * GIB, cores_per_node=4)
    assert without.intra_node_bytes_per_second == 31.5e9
    assert without.inter_node_bytes_per_second == 12.5e9
    assert (without.cores_per_node, without.ram_bytes_per_node) == (4, 16 * GIB)
