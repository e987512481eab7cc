# SPDX-License-Identifier: Apache-2.0
"""The trigger form: complete, in sections, and forgiving about text for numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.definitions.param import ParamsDict
from airflow.sdk.exceptions import ParamValidationError
from deepspeed_provider.operators.finetune import DeepSpeedFineTuneOperator
from deepspeed_provider.params import HARDWARE, PLACE, finetune_params, place_params
from deepspeed_provider.spec import FineTuneSpec

PARAMS = finetune_params()
ALL = {**PARAMS, **place_params()}


def test_each_field_has_its_param() -> None:
    assert set(PARAMS) == {field.name for field in dataclasses.fields(FineTuneSpec)}


def test_the_defaults_are_the_demonstration() -> None:
    spec = FineTuneSpec.from_params(ParamsDict(dict(PARAMS)).validate())
    assert spec.model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (spec.max_steps, spec.sequence_length, spec.lora_rank, spec.ranks) == (120, 160, 16, 2)
    assert spec.batch == (4, 2, 1)


@pytest.mark.parametrize("name", sorted(ALL))
def test_each_param_explains_itself(name: str) -> None:
    schema = ALL[name].schema
    assert schema["title"]
    assert str(ALL[name].description).endswith(".")
    assert schema["section"]
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    # The form draws a text area of JSON for several types, unless there are examples or an enum.
    assert len([kind for kind in types if kind != "null"]) == 1 or "examples" in schema


def test_numbers_may_arrive_as_text() -> None:
    params = ParamsDict(dict(PARAMS))
    params.update({"learning_rate": "2e-5", "max_steps": None, "epochs": "3", "lora_rank": "8"})
    spec = FineTuneSpec.from_params(params.validate())
    assert (spec.learning_rate, spec.max_steps, spec.epochs, spec.lora_rank) == (2e-5, None, 3.0, 8)


def test_the_form_refuses_what_is_out_of_bounds() -> None:
    params = ParamsDict(dict(PARAMS))
    with pytest.raises(ParamValidationError):
        params["zero_stage"] = 4


def test_defaults_can_be_replaced() -> None:
    assert set(finetune_params("model", "data")) == {"model", "data"}
    assert finetune_params(max_steps=3)["max_steps"].value == 3
    with pytest.raises(TypeError, match="max_stesp"):
        finetune_params(max_stesp=3)


JOB = {"cluster": {"spark_env_vars": {"HF_TOKEN": "{{secrets/a/b}}", "QUOTES": "'\"<é>"}}, "queue": False}


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        pytest.param({}, {"databricks_conn_id": None, "base_uri": None, "job": None, "plan_options": None}, id="no"),
        pytest.param({"databricks_conn_id": "", "base_uri": " "}, {"databricks_conn_id": None}, id="blanks of a form"),
        pytest.param({"databricks_conn_id": "d", "job": JOB}, {"databricks_conn_id": "d", "job": JOB}, id="an object"),
        pytest.param({"plan": "auto", "use_gpu": True}, {"plan": "auto", "use_gpu": True}, id="planned"),
        pytest.param(
            {"plan": "auto", "plan_options": {"budget_usd": 50, "spot": True}},
            {"plan_options": {"budget_usd": 50, "spot": True}},
            id="planned within limits",
        ),
    ],
)
def test_where_it_runs_reaches_the_operators(given: dict[str, Any], rendered: dict[str, Any]) -> None:
    params = ParamsDict(place_params())
    params.update(given)
    with DAG("where"):
        task = DeepSpeedFineTuneOperator(task_id="train", spec={}, dataset="/data", **PLACE, **HARDWARE)
    task.render_template_fields({"params": params.validate()})
    task.read_templates()
    assert {name: getattr(task, name) for name in rendered} == rendered


def test_only_some_and_others_by_default() -> None:
    assert set(place_params(*PLACE)) == set(PLACE)
    assert set(place_params()) == {*PLACE, *HARDWARE}
    assert place_params(databricks_conn_id="mine")["databricks_conn_id"].value == "mine"
    with pytest.raises(TypeError, match="databriks"):
        place_params(databriks="mine")
