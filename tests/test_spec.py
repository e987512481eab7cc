# SPDX-License-Identifier: Apache-2.0
"""A user's request: every problem at once, or a spec."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from deepspeed_provider.errors import SpecError
from deepspeed_provider.spec import FineTuneSpec, Method, Precision
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MODEL = {"model": "m"}
FIELDS = [field.name for field in dataclasses.fields(FineTuneSpec)]


def problems(**params: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        FineTuneSpec.from_params({**MODEL, **params})
    return {problem.field: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        pytest.param({"max_steps": "60"}, "max_steps", 60, id="integer as text"),
        pytest.param({"learning_rate": "2e-5"}, "learning_rate", 2e-5, id="exponent as text"),
        pytest.param({"max_steps": 60.0}, "max_steps", 60, id="whole float"),
        pytest.param({"max_steps": ""}, "max_steps", None, id="empty text is the default"),
        pytest.param({"sequence_length": None}, "sequence_length", 512, id="null is the default"),
        pytest.param({"method": "full"}, "method", Method.FULL, id="enum"),
        pytest.param({"precision": "bf16"}, "precision", Precision.BF16, id="precision"),
        pytest.param({"lora_targets": "q_proj, v_proj"}, "lora_targets", ("q_proj", "v_proj"), id="names as text"),
        pytest.param({"lora_targets": ["q_proj"]}, "lora_targets", ("q_proj",), id="names as list"),
        pytest.param({"merge_adapter": "false"}, "merge_adapter", False, id="flag as text"),
        pytest.param({"data": "s3a://b/x.JSONL.gz"}, "data", "s3a://b/x.JSONL.gz", id="compressed file"),
        pytest.param({"data": "/data/chats"}, "data", "/data/chats", id="folder"),
        pytest.param({"registered_model_name": " "}, "registered_model_name", None, id="blank name"),
        pytest.param({"method": "full", "lora_rank": 16}, "lora_rank", 16, id="the form's default with full"),
    ],
)
def test_accepted(params: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(FineTuneSpec.from_params({**MODEL, **params}), field) == value


@pytest.mark.parametrize(
    ("params", "field", "text"),
    [
        pytest.param({"model": None}, "model", "is required", id="no model"),
        pytest.param({"modle": "x"}, "modle", "Did you mean 'model'?", id="misspelt field"),
        pytest.param({"method": "lroa"}, "method", "Did you mean 'lora'?", id="misspelt method"),
        pytest.param({"method": "qlora"}, "method", "QLoRA (4-bit base weights) is not offered yet", id="qlora"),
        pytest.param({"precision": "bf61"}, "precision", "Did you mean 'bf16'?", id="misspelt precision"),
        pytest.param({"schedule": "cosin"}, "schedule", "Did you mean 'cosine'?", id="misspelt schedule"),
        pytest.param({"max_steps": 0}, "max_steps", "The smallest that works is 1.", id="too few steps"),
        pytest.param({"zero_stage": 4}, "zero_stage", "The largest that works is 3.", id="stage"),
        pytest.param({"eval_steps": "1.5"}, "eval_steps", "Nearest: 2.", id="half a step"),
        pytest.param({"seed": True}, "seed", "number, not true or false", id="flag for a number"),
        pytest.param({"learning_rate": "nan"}, "learning_rate", "finite", id="not a number"),
        pytest.param({"learning_rate": float("inf")}, "learning_rate", "finite", id="infinite"),
        pytest.param({"learning_rate": 0}, "learning_rate", "greater than 0", id="no learning"),
        pytest.param({"lora_rank": "many"}, "lora_rank", "integer", id="words for a number"),
        pytest.param({"max_steps": 5, "epochs": 1}, "epochs", "only one of max_steps and epochs", id="two lengths"),
        pytest.param({"method": "full", "lora_rank": 8}, "lora_rank", "only with method 'lora'", id="lora with full"),
        pytest.param({"data": "s3a://key:pw@b/x.jsonl"}, "data", "(hidden)", id="a password in an address"),
        pytest.param({"model": "s3a://key:pw@b/model"}, "model", "(hidden)", id="a password in a model's address"),
        pytest.param({"data": "docstring"}, "data", "Did you mean 'docstrings'?", id="misspelt corpus"),
        pytest.param({"data": "s3://b/x.xlsx"}, "data", ".parquet", id="unknown format"),
        pytest.param(
            {"ranks": 3, "effective_batch_size": 4},
            "effective_batch_size",
            "cannot be met with 3 ranks. Nearest that can: 3 or 6.",
            id="batch and ranks",
        ),
        pytest.param(
            {"ranks": 2, "effective_batch_size": 10, "micro_batch_size": 4},
            "effective_batch_size",
            "cannot be met with micro batch 4 x 2 ranks. Nearest that can: 8 or 16.",
            id="batch and micro batch",
        ),
        pytest.param(
            {"ranks": 2, "effective_batch_size": 7, "micro_batch_size": 2, "gradient_accumulation_steps": 2},
            "effective_batch_size",
            "Nearest that can: 8.",
            id="whole triple",
        ),
    ],
)
def test_refused(params: dict[str, Any], field: str, text: str) -> None:
    assert text in problems(**params)[field]


def test_all_problems_are_told_together() -> None:
    found = problems(modle="x", method="qlora", max_steps=3, epochs=2, zero_stage=9, data="docs", ranks=0, seed="x")
    assert set(found) == {"modle", "method", "epochs", "zero_stage", "data", "ranks", "seed"}


@pytest.mark.parametrize("params", [None, [], "model", 3], ids=repr)
def test_what_is_no_mapping_is_refused(params: Any) -> None:
    with pytest.raises(SpecError, match="mapping"):
        FineTuneSpec.from_params(params)


@pytest.mark.parametrize(
    ("params", "batch"),
    [
        pytest.param({}, (4, 4, 1), id="nothing given"),
        pytest.param({"ranks": 2, "effective_batch_size": 4}, (4, 2, 1), id="the demonstration"),
        pytest.param({"effective_batch_size": 64}, (64, 4, 16), id="accumulates"),
        pytest.param({"effective_batch_size": 7}, (7, 1, 7), id="a prime"),
        pytest.param({"micro_batch_size": 3, "ranks": 2}, (6, 3, 1), id="micro batch"),
        pytest.param({"gradient_accumulation_steps": 5, "effective_batch_size": 10}, (10, 2, 5), id="accumulation"),
    ],
)
def test_batch(params: dict[str, Any], batch: tuple[int, int, int]) -> None:
    assert FineTuneSpec.from_params({**MODEL, **params}).batch == batch


def test_a_length_and_a_rate_are_always_set() -> None:
    spec = FineTuneSpec.from_params(MODEL)
    assert spec.length == (None, 1.0)
    assert spec.peak_learning_rate == 5e-4
    assert FineTuneSpec.from_params({**MODEL, "method": "full"}).peak_learning_rate == 2e-5


def test_a_spec_made_by_hand_keeps_the_rules() -> None:
    with pytest.raises(ValueError, match="only one of max_steps and epochs"):
        FineTuneSpec(model="m", max_steps=1, epochs=1.0)


NUMBERS = st.integers(-3, 10**9) | st.floats() | st.integers().map(str) | st.floats(allow_nan=True).map(str)
ANYTHING = NUMBERS | st.none() | st.booleans() | st.text(max_size=20) | st.lists(st.text(max_size=5), max_size=3)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=300)
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=12) | st.integers(), ANYTHING, max_size=12))
def test_any_mapping_gives_a_spec_or_problems(params: dict[Any, Any]) -> None:
    problems, spec = [], None
    try:
        spec = FineTuneSpec.from_params({"model": "m", **params})
    except SpecError as error:
        problems = error.problems
    assert (spec is None) == bool(problems)
    if spec is not None:
        effective, micro, accumulation = spec.batch
        assert effective == micro * accumulation * spec.ranks


def small_specs() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"model": st.sampled_from(["a/b", "/models/x"])},
        optional={
            "method": st.sampled_from(["lora", "full"]),
            "max_steps": st.integers(1, 100) | st.integers(1, 100).map(str),
            "learning_rate": st.floats(1e-8, 1.0),
            "ranks": st.integers(1, 8),
            "micro_batch_size": st.integers(1, 16),
            "gradient_accumulation_steps": st.integers(1, 16),
            "lora_targets": st.sampled_from(["all-linear", "q_proj,v_proj"]),
            "zero_stage": st.integers(0, 3),
            "precision": st.sampled_from(list(Precision)),
        },
    )


@given(small_specs())
def test_a_spec_survives_as_json(params: dict[str, Any]) -> None:
    params = {name: value for name, value in params.items() if params.get("method") != "full" or "lora" not in name}
    spec = FineTuneSpec.from_params(params)
    assert FineTuneSpec.from_params(json.loads(json.dumps(spec.to_params()))) == spec
