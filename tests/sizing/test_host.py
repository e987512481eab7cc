# SPDX-License-Identifier: Apache-2.0
"""Host memory and NVMe of one node, in numbers."""

from __future__ import annotations

import pytest
from deepspeed_provider.sizing.options import parse_options
from sizing.test_properties import estimate

GIB = 2**30
NAME = "meta-llama/Llama-2-7b-hf"
P = 6_738_415_616


def host(**options):
    return estimate(NAME, parse_options(options)).host


def parts(found) -> dict[str, int]:
    return {part.name: part.bytes for part in found}


@pytest.mark.parametrize("ranks", [1, 8])
def test_processes_and_loaders(ranks):
    found = parts(host(gpus_per_node=ranks).parts)
    assert (found["processes"], found["data_loader"]) == (3 * GIB * ranks, GIB // 2 * ranks)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, 2 * P, id="one GPU"),
        pytest.param({"precision": "fp32"}, 4 * P, id="fp32"),
        pytest.param({"gpus_per_node": 4}, 4 * 2 * P, id="all ranks at once"),
        pytest.param({"gpus_per_node": 4, "nodes": 2}, 4 * 2 * P, id="of one node"),
        pytest.param({"gpus_per_node": 4, "load_in_turn": True}, 2 * P, id="in turn"),
        pytest.param({"gpus_per_node": 4, "zero_stage": 2}, 4 * 2 * P, id="stage 2"),
        pytest.param({"gpus_per_node": 4, "zero_stage": 3}, 2 * P, id="stage 3: the first rank reads"),
        pytest.param({"gpus_per_node": 4, "method": "lora"}, 4 * 2 * P, id="LoRA: the base model"),
        pytest.param({"gpus_per_node": 4, "method": "qlora"}, 4 * 2 * P, id="QLoRA: as it was before"),
        pytest.param({"gpus_per_node": 4, "method": "qlora", "zero_stage": 3}, 4 * 2 * P, id="QLoRA, stage 3"),
    ],
)
def test_loading_of_the_checkpoint(options, expected):
    found = host(**options)
    assert parts(found.parts)["checkpoint_loading"] == expected
    assert found.peak_at == "loading"


def test_loading_and_offloaded_states_are_both_told():
    """Stage 3 without NVMe: 16 bytes a parameter on the host while it trains, 2 while it is loaded."""
    found = host(zero_stage=3, gpus_per_node=4, offload="optimizer")
    assert found.peak_at == "training"
    assert parts(found.parts)["offloaded_optimizer"] == 16 * P
    assert parts(found.at_other_moments) == {"checkpoint_loading": 2 * P}
    assert found.total_bytes == sum(parts(found.parts).values())


def test_a_checkpoint_larger_than_what_is_offloaded():
    found = host(zero_stage=2, gpus_per_node=8, offload="optimizer", method="lora")
    assert found.peak_at == "loading"
    assert parts(found.parts)["checkpoint_loading"] == 8 * 2 * P
    assert {"offloaded_optimizer", "offload_buffers"} <= parts(found.at_other_moments).keys()
    assert "checkpoint_loading" not in parts(found.at_other_moments)


def test_partitions_of_parameters_are_there_while_they_are_filled():
    found = host(zero_stage=3, gpus_per_node=4, offload="parameters")
    assert found.peak_at == "loading"
    assert parts(found.parts)["offloaded_parameters"] == 2 * P
    assert parts(found.parts)["checkpoint_loading"] == 2 * P


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Without ZeRO each of the ranks has all states; ZeRO divides them among all GPUs, this node has its half.
        pytest.param({"optimizer": "paged-adamw"}, 4 * 8 * P, id="stage 0"),
        pytest.param({"optimizer": "paged-adamw", "zero_stage": 1}, 4 * P, id="stage 1"),
        pytest.param({"optimizer": "paged-adamw", "precision": "pure-bf16", "zero_stage": 1}, 2 * P, id="pure bf16"),
        pytest.param(
            {"optimizer": "paged-adamw-8bit", "zero_stage": 1}, 4 * 2 * (P // 8 + 4 * -(-P // 2048)), id="8-bit"
        ),
        pytest.param({"optimizer": "adamw"}, 0, id="not paged"),
    ],
)
def test_paged_states(options, expected):
    found = host(gpus_per_node=4, nodes=2, **options)
    assert parts([*found.parts, *found.at_other_moments]).get("paged_optimizer", 0) == expected


def nvme(**options):
    return estimate(NAME, parse_options({"zero_stage": 3, "offload_device": "nvme", "gpus_per_node": 4, **options}))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"offload": "optimizer"}, {"offloaded_optimizer": 16 * P}, id="optimizer"),
        pytest.param({"offload": "parameters"}, {"offloaded_parameters": 2 * P}, id="parameters"),
        pytest.param({"offload": "all"}, {"offloaded_optimizer": 16 * P, "offloaded_parameters": 2 * P}, id="all"),
        pytest.param(
            {"offload": "all", "nodes": 2},
            {"offloaded_optimizer": 8 * P, "offloaded_parameters": P},
            id="half of it on each node",
        ),
        pytest.param({"offload": "optimizer", "optimizer": "sgd"}, {"offloaded_optimizer": 8 * P}, id="no states"),
        pytest.param({"offload": "none", "offload_device": "cpu"}, {}, id="nothing"),
    ],
)
def test_what_is_on_nvme(options, expected):
    assert parts(nvme(**options).nvme.parts) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # A quarter of 6.7 B parameters is more than the default sub-group of 1 B: the tensors until there are 1 B.
        pytest.param({}, pytest.approx(4 * 4 * 4 * 10**9, rel=0.02), id="as many as a sub-group has"),
        pytest.param({"sub_group_size": 10**10}, 4 * 4 * 4 * P // 4, id="all of a rank's share"),
        pytest.param({"nodes": 8}, 4 * 4 * 4 * P // 32, id="no more than is swapped"),
        pytest.param({"sub_group_size": 10**8}, pytest.approx(4 * 4 * 4 * 10**8, rel=0.2), id="a smaller sub-group"),
        pytest.param(
            {"nodes": 8, "precision": "pure-bf16"}, 4 * 4 * 2 * P // 32, id="in the optimizer's own precision"
        ),
    ],
)
def test_buffers_through_which_states_are_swapped(options, expected):
    found = nvme(offload="optimizer", **options)
    buffers = parts([*found.host.parts, *found.host.at_other_moments])["optimizer_swap_buffers"]
    assert buffers == expected


def test_buffers_through_which_parameters_are_swapped():
    found = nvme(offload="parameters")
    buffers = parts([*found.host.parts, *found.host.at_other_moments])["parameter_swap_buffers"]
    assert buffers == 4 * 5 * 100_000_000 * 2


class TestQuantisedWeightsThatAreOffloaded:
    @staticmethod
    def found(**options):
        return estimate(NAME, parse_options({"method": "qlora", "zero_stage": 3, "offload": "all", **options}))

    # 6,476,005,376 weights of linear modules; embedding, head and norms are not quantised.
    Q = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    SCALES = -(-Q // 64) + 4 * -(-Q // 16_384)

    @pytest.mark.parametrize("ranks", [1, 4])
    def test_bytes_that_zero_cannot_cut_stay_on_the_gpu_only(self, ranks):
        found = self.found(gpus_per_node=ranks, quant_storage="uint8")
        assert found.gpu.part("quantized_weights") == self.Q // 2 + self.SCALES
        assert parts(found.host.parts)["offloaded_parameters"] < 2 * (P - self.Q) * 1.5

    @pytest.mark.parametrize("ranks", [1, 4])
    def test_floating_point_storage_is_offloaded_but_for_its_scales(self, ranks):
        found = self.found(gpus_per_node=ranks)
        assert found.gpu.part("quantized_weights") == self.SCALES
        assert parts(found.host.parts)["offloaded_parameters"] > self.Q // 2

    def test_floating_point_storage_is_divided(self):
        found = self.found(gpus_per_node=4, offload="none")
        assert found.gpu.part("quantized_weights") == self.Q // 8 + self.SCALES

    def test_what_is_never_gathered_is_not_counted_as_gathered(self):
        """Of 32 layers' weights only norms, beside embedding and head: all that there is of them, in bf16."""
        found = self.found(gpus_per_node=4, offload="none", quant_storage="uint8")
        assert found.gpu.part("gathered_parameters") == 2 * (P - self.Q)
        most = self.found(gpus_per_node=4, offload="none").gpu.part("gathered_parameters")
        assert 2 * (P - self.Q) != most < self.Q // 2 + 2 * (P - self.Q)

    def test_other_offload_of_the_same_run_moves_the_rest(self):
        on_gpu = self.found(gpus_per_node=4, offload="none", quant_storage="uint8").gpu
        assert on_gpu.part("unquantized_weights") == 2 * -(-(P - self.Q) // 4)
        assert self.found(gpus_per_node=4, quant_storage="uint8").gpu.part("unquantized_weights") == 0
