# SPDX-License-Identifier: Apache-2.0
"""Options of training: defaults, loose values, and every problem at once with what would work."""

from __future__ import annotations

import pytest
from deepspeed_provider.errors import SpecError
from deepspeed_provider.sizing.options import Method, Precision, TrainingOptions, parse_options


def problems(**values: object) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_options(values)
    return {problem.field: f"{problem.problem}. {problem.suggestion}" for problem in caught.value.problems}


def test_nothing_given_is_the_defaults():
    assert parse_options({}) == TrainingOptions() == parse_options(dict.fromkeys(TrainingOptions.model_fields))


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("sequence_length", "4096", 4096),
        ("sequence_length", 4096.0, 4096),
        ("lora_dropout", "0.1", 0.1),
        ("gradient_checkpointing", "false", False),
        ("gradient_checkpointing", "no", False),
        ("overlap_comm", 1, True),
        ("method", "QLoRA", Method.QLORA),
        ("precision", "pure_bf16", Precision.PURE_BF16),
        ("precision", " BF16 ", Precision.BF16),
        ("lora_targets", "q, v,", ("q", "v")),
        ("lora_targets", ["q", "v"], ("q", "v")),
        ("reduce_bucket_size", "0", 0),
    ],
    ids=lambda value: str(value),
)
def test_loose_values_are_read(name, value, read):
    assert getattr(parse_options({name: value}), name) == read


COUNTS = ["gpus_per_node", "nodes", "micro_batch_size", "sequence_length", "gradient_accumulation_steps", "lora_rank"]


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, "", "x", True, 1.5, float("nan"), float("inf"), [], {}], ids=repr)
def test_a_count_is_a_whole_number_of_at_least_one(name, value):
    assert set(problems(**{name: value})) == {name}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"method": "qora"}, {"method": "one of full, lora, qlora. Did you mean 'qlora'?"}),
        ({"precision": "tf32"}, {"precision": "fp32"}),
        ({"optimizer": "adamw_8bits"}, {"optimizer": "Did you mean 'adamw-8bit'?"}),
        ({"attention": "sdp"}, {"attention": "Did you mean 'sdpa'?"}),
        ({"zero_stage": 4}, {"zero_stage": "less than or equal to 3"}),
        ({"lora_dropout": 1}, {"lora_dropout": "less than 1"}),
        ({"lora_targets": ","}, {"lora_targets": "at least 1"}),
        ({"zero_stge": 2}, {"zero_stge": "Did you mean 'zero_stage'?"}),
        ({"zzz": 2}, {"zzz": "Known are method, precision"}),
    ],
    ids=lambda value: next(iter(value.items())).__repr__(),
)
def test_a_problem_comes_with_what_would_work(values, said):
    found = problems(**values)
    assert set(found) == set(said)
    for field, text in said.items():
        assert text in found[field]


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"offload": "optimizer"}, {"offload"}),
        ({"offload": "parameters", "zero_stage": 2}, {"offload"}),
        ({"offload": "all", "offload_device": "nvme", "zero_stage": 1}, {"offload", "offload_device"}),
        ({"offload": "optimizer", "offload_device": "nvme", "zero_stage": 2}, {"offload_device"}),
        ({"adapter_precision": "fp16", "method": "lora"}, {"adapter_precision"}),
        ({"nodes": 0, "offload": "optimizer", "method": "x", "extra": 1}, {"nodes", "offload", "method", "extra"}),
        # Nothing is said of a default in the place of what is wrong.
        ({"zero_stage": 5, "offload": "optimizer", "offload_device": "nvme"}, {"zero_stage"}),
        ({"zero_stage": "three", "offload": "all"}, {"zero_stage"}),
        ({"zero_stage": 1, "offload": "some", "offload_device": "nvme"}, {"offload"}),
    ],
    ids=lambda value: ",".join(value),
)
def test_what_deepspeed_refuses_or_ignores_together(values, fields):
    assert set(problems(**values)) == fields


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloads_that_work(stage):
    assert parse_options({"offload": "optimizer", "zero_stage": stage}).offloads_optimizer
    everything = parse_options({"offload": "all", "offload_device": "nvme", "zero_stage": 3})
    assert everything.offloads_optimizer
    assert everything.offloads_parameters
