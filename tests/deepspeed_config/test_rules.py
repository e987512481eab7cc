# SPDX-License-Identifier: Apache-2.0
"""Each rule of the checker accepts and refuses what its row says; nothing that a person writes makes it fail."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from deepspeed_provider.deepspeed_config.check import check, findings_as_json
from deepspeed_provider.deepspeed_config.findings import Facts, Launcher, Severity
from deepspeed_provider.deepspeed_config.rules import RULES, Rule
from deepspeed_provider.deepspeed_config.schema import schema
from deepspeed_provider.sizing.options import Method
from hypothesis import given, settings
from hypothesis import strategies as st

BY_NAME = {rule.name: rule for rule in RULES}
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def found(config: dict[str, Any], **facts: Any) -> dict[str, str]:
    """Rule and path -> problem with suggestion."""
    return {f"{one.rule} {one.path}": f"{one.problem} {one.suggestion}" for one in check(config, Facts(**facts))}


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(RULES) >= 50


@every_rule
def test_the_accepted_example_has_no_error(rule: Rule) -> None:
    findings = check(rule.accepted.config, rule.accepted.facts)
    assert [one for one in findings if one.severity is Severity.ERROR or one.rule == rule.name] == []


@every_rule
def test_the_refused_example_breaks_the_rule(rule: Rule) -> None:
    assert rule.accepted != rule.refused
    before = copy.deepcopy(rule.refused.config)
    findings = [one for one in check(rule.refused.config, rule.refused.facts) if one.rule == rule.name]
    assert findings
    assert rule.refused.config == before
    for one in findings:
        assert one.severity is rule.severity
        assert one.problem.endswith((".", ")")), one
        assert one.suggestion.endswith((".", "?")), one


@every_rule
def test_the_refused_example_breaks_little_else(rule: Rule) -> None:
    others = {one.rule for one in check(rule.refused.config, rule.refused.facts)} - {rule.name}
    assert len(others) <= 1, others


BATCHES = {
    "too large": ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 4),
    "no multiple": ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, 4),
    "smaller than the ranks": ({"train_batch_size": 3}, 4),
    "accumulation alone": ({"train_batch_size": 30, "gradient_accumulation_steps": 4}, 2),
}


@pytest.mark.parametrize(("config", "ranks"), BATCHES.values(), ids=BATCHES)
def test_the_batch_sizes_that_are_named_work(config: dict[str, int], ranks: int) -> None:
    findings = check(config, Facts(world_size=ranks))
    assert [one.rule for one in findings] == ["batch-does-not-fit"]
    named = [int(word) for word in findings[0].suggestion.replace(",", " ").replace(".", " ").split() if word.isdigit()]
    assert named
    mended = config | {"train_batch_size": named[0]}
    assert check(mended, Facts(world_size=ranks)) == []


@given(
    st.integers(1, 400),
    st.none() | st.integers(1, 16),
    st.none() | st.integers(1, 16),
    st.integers(1, 64),
)
def test_a_batch_is_refused_exactly_when_it_cannot_be_split(
    total: int, micro: int | None, steps: int | None, ranks: int
) -> None:
    config = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    unit = (micro or 1) * (steps or 1) * ranks
    works = total == unit if micro and steps else total % unit == 0
    assert (check(config, Facts(world_size=ranks)) == []) == works


SENTENCES = {
    "misspelt": ({"gradient_cliping": 1.0}, {}, "ignored-key gradient_cliping", "Did you mean 'gradient_clipping'?"),
    "misplaced": (
        {"reduce_bucket_size": 5e8},
        {},
        "ignored-key reduce_bucket_size",
        "It belongs to 'zero_optimization'.",
    ),
    "misspelt in a model": (
        {"zero_optimization": {"stage": 2, "overlap_com": True}},
        {},
        "unknown-key zero_optimization.overlap_com",
        "Did you mean 'overlap_comm'?",
    ),
    "nested": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memry": True}}},
        {},
        "unknown-key zero_optimization.offload_param.pin_memry",
        "Did you mean 'pin_memory'?",
    ),
    "a device": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}},
        {},
        "not-a-choice zero_optimization.offload_param.device",
        "Did you mean 'cpu'?",
    ),
    "a stage too high": ({"zero_optimization": {"stage": 4}}, {}, "not-a-choice zero_optimization.stage", "mean 3?"),
    "auto is fp32": ({"bf16": {"enabled": "auto"}}, {}, "auto bf16.enabled", "trains in fp32"),
    "auto of a default": (
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}},
        {},
        "auto zero_optimization.reduce_bucket_size",
        "500000000",
    ),
    "a parameter of torch's Adam only": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "fused": True}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        {},
        "optimizer-parameter optimizer.params.fused",
        "(cpu)",
    ),
    "a rate in quotes": (
        {"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}},
        {},
        "optimizer-value optimizer.params.lr",
        "without quotes: 1e-4.",
    ),
    "half the betas": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9]}}},
        {},
        "optimizer-value optimizer.params.betas",
        "[0.9, 0.999]",
    ),
    "a beta of 1": (
        {"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 1.0]}}},
        {},
        "optimizer-value optimizer.params.betas",
        "below 1",
    ),
    "a negative decay": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": -0.1}}},
        {},
        "optimizer-value optimizer.params.weight_decay",
        "from 0",
    ),
    "a rate that is none": (
        {"optimizer": {"type": "AdamW", "params": {"lr": None}}},
        {},
        "optimizer-value optimizer.params.lr",
        "Write 1e-5.",
    ),
    "a schedule's rate in quotes": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "1e-4"}}},
        {},
        "optimizer-value scheduler.params.warmup_max_lr",
        "without quotes: 1e-4.",
    ),
    "no disk": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_disk0/x"}}},
        {"has_disk": False},
        "nvme-without-disk zero_optimization.offload_param.device",
        "Use 'cpu'",
    ),
    "qlora": (
        {"zero_optimization": {"stage": 3}},
        {"method": Method.QLORA},
        "qlora-at-stage-3 zero_optimization.stage",
        "2",
    ),
    "deprecated": (
        {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        {},
        "deprecated-key zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
    ),
}


@pytest.mark.parametrize(("config", "facts", "place", "text"), SENTENCES.values(), ids=SENTENCES)
def test_a_sentence_names_the_nearest_that_works(
    config: dict[str, Any], facts: dict[str, Any], place: str, text: str
) -> None:
    assert text in found({"train_micro_batch_size_per_gpu": 1, **config}, **facts)[place]


# The template of the Hugging Face documentation for ZeRO 3 with offload.
HF_TEMPLATE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def test_a_template_of_the_trainer_is_good_there_and_only_there() -> None:
    assert check(HF_TEMPLATE, Facts(launcher=Launcher.HUGGING_FACE, world_size=8)) == []
    rules = {one.rule for one in check(HF_TEMPLATE, Facts(world_size=8)) if one.severity is Severity.ERROR}
    assert rules == {"auto"}


NAMES = [
    *schema().sections[""].fields,
    *schema().sections["zero_optimization"].fields,
    "stage",
    "device",
    "params",
    "type",
]
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["auto", "cpu", "nvme"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@given(
    st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), anything, max_size=6), st.none() | st.integers(1, 64)
)
def test_whatever_is_written_is_answered(config: dict[str, Any], ranks: int | None) -> None:
    findings_as_json(check(config, Facts(world_size=ranks)))
