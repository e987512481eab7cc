# SPDX-License-Identifier: Apache-2.0
"""What an estimate's reader is told."""

from __future__ import annotations

import re

import pytest
from deepspeed_provider.sizing.options import parse_options
from hypothesis import given, settings
from sizing.test_properties import estimate, otherwise, trainings

LLAMA = "meta-llama/Llama-2-7b-hf"
SMALL = "HuggingFaceTB/SmolLM2-135M"
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
LOWER = re.compile(r"ZeRO stage (\d) would need less on each GPU: ([\d.,]+) instead of ([\d.,]+) GiB")


def warned(name: str, **options) -> str:
    return "\n".join(estimate(name, parse_options(options)).warnings)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        pytest.param(LLAMA, {"attention": "flash", "precision": "fp32"}, "fp16 and bf16 only", id="flash in fp32"),
        pytest.param(
            LLAMA,
            {"optimizer": "adamw-8bit", "zero_stage": 2, "offload": "optimizer"},
            "adamw-8bit on the GPU",
            id="8-bit, offloaded",
        ),
        pytest.param(
            LLAMA,
            {"optimizer": "paged-adamw", "zero_stage": 3, "offload": "all"},
            "paged-adamw on the GPU",
            id="paged, offloaded",
        ),
        pytest.param(LLAMA, {"optimizer": "paged-adamw"}, "counted on the host", id="paged"),
        pytest.param(SMALL, {"method": "lora", "lora_rank": 2048}, "more than the model's 134,515,008", id="rank"),
        pytest.param(
            LLAMA,
            {"method": "qlora", "zero_stage": 3, "quant_storage": "uint8", "offload": "all"},
            "every GPU holds them all and keeps them, also with offload",
            id="uint8 in stage 3",
        ),
        pytest.param(
            SMALL,
            {"zero_stage": 3, "gpus_per_node": 4, "offload": "optimizer", "offload_device": "nvme"},
            "Lower sub_group_size (1,000,000,000), for example to 3,362,875",
            id="one sub-group",
        ),
        pytest.param(
            SMALL,
            {"zero_stage": 3, "gpus_per_node": 4, "offload": "parameters", "offload_device": "nvme"},
            "Swapping parameters takes 3.7 GiB",
            id="parameters fewer than their buffers",
        ),
        pytest.param(LLAMA, {"zero_stage": 2}, "ZeRO stage 0 would need less", id="ZeRO on one GPU"),
        pytest.param(
            SMALL, {"zero_stage": 3, "gpus_per_node": 2}, "ZeRO stage 2 would need less", id="a model gathered whole"
        ),
    ],
)
def test_what_is_warned_of(name, options, words):
    assert words in warned(name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(LLAMA, {"attention": "flash"}, id="flash in bf16"),
        pytest.param(LLAMA, {"optimizer": "adamw-8bit"}, id="8-bit"),
        pytest.param(LLAMA, {"zero_stage": 2, "gpus_per_node": 2, "offload": "optimizer"}, id="adamw, offloaded"),
        pytest.param(LLAMA, {"zero_stage": 2, "gpus_per_node": 8}, id="stage 2"),
        pytest.param(LLAMA, {"zero_stage": 3, "gpus_per_node": 8}, id="stage 3"),
        pytest.param(
            LLAMA,
            {
                "zero_stage": 3,
                "gpus_per_node": 4,
                "offload": "all",
                "offload_device": "nvme",
                "sub_group_size": 100_000_000,
            },
            id="small sub-groups",
        ),
        pytest.param(LLAMA, {"method": "qlora", "zero_stage": 3, "gpus_per_node": 2}, id="QLoRA in stage 3"),
    ],
)
def test_what_needs_no_warning(name, options):
    assert warned(name, **options) == ""


class TestExperts:
    # Mixtral 8x7B: 32 layers of 8 experts of 3 matrices.
    EXPERTS = 32 * 8 * 3 * 4096 * 14_336

    def test_counted_in_4_bits_unless_told_otherwise(self):
        found = estimate(MIXTRAL, parse_options({"method": "qlora"}))
        assert found.gpu.part("quantized_weights") > self.EXPERTS // 2
        said = "\n".join(found.warnings)
        assert f"counted in 4 bits, {self.EXPERTS * (1 / 2 + 1 / 64 + 4 / 16_384) / 2**30:,.1f} GiB" in said
        assert f"there they are {4 * self.EXPERTS / 2**30:,.1f} GiB" in said

    def test_as_transformers_5_has_them(self):
        found = estimate(MIXTRAL, parse_options({"method": "qlora", "quantize_experts": False}))
        assert found.gpu.part("quantized_weights") < self.EXPERTS // 20
        assert found.gpu.part("unquantized_weights") > 4 * self.EXPERTS
        assert "they are not quantised" in "\n".join(found.warnings)

    def test_a_router_is_never_quantised(self):
        both = [estimate(MIXTRAL, parse_options({"method": "qlora", "quantize_experts": asked})) for asked in (1, 0)]
        unquantized = [found.gpu.part("unquantized_weights") for found in both]
        assert unquantized[1] - unquantized[0] == 4 * self.EXPERTS


@settings(max_examples=150)
@given(trainings(offload="none"))
def test_a_lower_stage_needs_what_is_said(training):
    name, options = training
    found = estimate(name, options)
    for stage, there, here in LOWER.findall("\n".join(found.warnings)):
        lower = estimate(name, otherwise(options, zero_stage=int(stage)))
        assert f"{found.gpu.total_bytes / 2**30:,.2f}" == here
        assert f"{lower.gpu.total_bytes / 2**30:,.2f}" == there
        assert lower.gpu.total_bytes < found.gpu.total_bytes


@settings(max_examples=100)
@given(trainings(offload="none", method="full", gpus_per_node=1, nodes=1))
def test_zero_on_one_gpu_that_needs_a_hundredth_more_is_told(training):
    name, options = training
    found = estimate(name, options)
    alone = estimate(name, otherwise(options, zero_stage=0))
    told = LOWER.search("\n".join(found.warnings)) is not None
    assert told == (alone.gpu.total_bytes < 0.99 * found.gpu.total_bytes)
