# SPDX-License-Identifier: Apache-2.0
"""A plan on its way from one task to another."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepspeed_provider.handed_plan import read_plan
from operators.test_finetune_handover import PLANS


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_what_is_kept_of_it_is_enough(plan: dict[str, Any]) -> None:
    found = read_plan(plan)
    kept = json.loads(json.dumps(found.to_json()))
    assert read_plan(kept) == found == read_plan(json.dumps(kept))
    assert kept["cluster"] == plan["cluster"]
    assert kept["deepspeed_config"] == plan["deepspeed_config"]
    assert len(json.dumps(kept)) < 8_000, "of the 64 KB that a task may keep under one key"


@pytest.mark.parametrize(("name", "bf16"), [("one node", True), ("fp16", False)])
def test_its_hardware_computes_as_the_gpu_does(name: str, bf16: bool) -> None:
    found, settings = read_plan(PLANS[name]), PLANS[name]["chosen"]["settings"]
    assert (found.hardware.nodes, found.hardware.gpus_per_node) == (settings["nodes"], settings["gpus_per_node"])
    assert (found.hardware.use_gpu, found.hardware.bf16) == (True, bf16)
