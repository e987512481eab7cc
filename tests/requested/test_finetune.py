# SPDX-License-Identifier: Apache-2.0
"""The request for a plan that a spec makes by itself."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_provider.requested.finetune import request_for
from deepspeed_provider.requested.model_source import ModelSource
from deepspeed_provider.requested.plan import planned
from deepspeed_provider.spec import FineTuneSpec

COUNTED = {"dataset_uri": "mem://data", "splits": {"train": {"rows": 1001}, "heldout": {"rows": 9}}}
LORA = {"method": "lora", "lora_rank": 8, "lora_targets": ["q_proj", "v_proj"], "lora_dropout": 0.1}


def requested(dataset: Any = COUNTED, **fields: Any) -> dict[str, Any]:
    return request_for(FineTuneSpec.from_params({"model": "llama-2-7b-hf", **fields}), dataset)


@pytest.mark.parametrize(
    ("fields", "dataset", "rows"),
    [
        pytest.param({"max_steps": 10}, "mem://data", 640, id="steps of the usual batch"),
        pytest.param({"max_steps": 10, "effective_batch_size": 4}, COUNTED, 40, id="steps of a batch"),
        pytest.param({}, COUNTED, 1001, id="one epoch where nothing is said"),
        pytest.param({"epochs": 0.5}, COUNTED, 501, id="a part of an epoch"),
        pytest.param({"epochs": 2}, "mem://data", None, id="an address has no rows"),
        pytest.param({"epochs": 2}, {"dataset_uri": "mem://data", "rows": {}}, None, id="nor has half a manifest"),
    ],
)
def test_how_long_it_trains(fields: dict[str, Any], dataset: Any, rows: int | None) -> None:
    assert requested(dataset, **fields).get("rows") == rows


def test_what_is_trained_is_as_the_planner_names_it() -> None:
    found = planned(requested(**LORA, effective_batch_size=16, sequence_length=256), ModelSource())
    options = found.plan.job.options
    assert (options.method, options.lora_rank, options.lora_targets) == ("lora", 8, ("q_proj", "v_proj"))
    assert (options.lora_dropout, options.sequence_length, found.plan.job.effective_batch_size) == (0.1, 256, 16)


def test_a_full_finetune_says_nothing_of_adapters() -> None:
    assert not [name for name in requested(method="full") if name.startswith("lora")]
