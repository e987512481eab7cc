# SPDX-License-Identifier: Apache-2.0
"""The bundled models: every config can be read, counts are the published ones, names are forgiving."""

from __future__ import annotations

import json
from importlib import resources

import pytest
from deepspeed_provider.errors import SpecError
from deepspeed_provider.sizing.catalogue import model_config, model_names
from deepspeed_provider.sizing.families import architecture

CATALOGUE = json.loads(resources.files("deepspeed_provider.sizing").joinpath("data/models.json").read_text())
ROWS = {name: row for name, row in CATALOGUE["models"].items() if "config" in row}


@pytest.mark.parametrize("name", ROWS)
def test_every_bundled_config_has_the_published_count(name):
    row = ROWS[name]
    found = architecture(model_config(name))
    assert row["source"] in CATALOGUE["sources"]
    assert found.parameters == row.get("parameters", found.parameters)
    assert found.model_type == "mpt" or not found.warnings


def test_models_that_share_a_config_point_at_one():
    shared = {name: row["same_as"] for name, row in CATALOGUE["models"].items() if "same_as" in row}
    assert set(shared.values()) <= set(ROWS)
    assert all(model_config(name) == model_config(base) for name, base in shared.items())


def test_most_counts_are_checked():
    assert sum("parameters" in row for row in ROWS.values()) / len(ROWS) > 0.85


@pytest.mark.parametrize(
    "name",
    ["meta-llama/Llama-3.1-8B", "META-LLAMA/llama-3.1-8b", "Llama-3.1-8B", " llama-3.1-8b "],
    ids=["hub id", "any case", "last part", "last part in any case, with spaces"],
)
def test_a_model_is_found_by(name):
    assert model_config(name) == ROWS["meta-llama/Llama-3.1-8B"]["config"]


def test_a_last_part_that_equal_models_share_is_enough():
    assert model_config("Llama-2-7b-hf") == model_config("meta-llama/Llama-2-7b-hf")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        pytest.param("meta-llama/Llama-3.1-9B", "meta-llama/Llama-3.1-8B", id="another size"),
        pytest.param("mistral-7b", "mistralai/Mistral-7B-v0.1", id="no version"),
        pytest.param("xxxxxxxx", "path of a config.json", id="nothing near"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name, nearest):
    with pytest.raises(SpecError, match=nearest) as caught:
        model_config(name)
    assert caught.value.problems[0].value == name


def test_a_config_is_the_callers_own():
    model_config("openai-community/gpt2")["n_embd"] = 1
    assert model_config("openai-community/gpt2")["n_embd"] == 768


def test_names_are_hub_ids():
    assert len(model_names()) > 200
    assert all(name.count("/") == 1 for name in model_names())
