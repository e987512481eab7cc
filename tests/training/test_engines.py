# SPDX-License-Identifier: Apache-2.0
"""Where adapters go in models of several families."""

from __future__ import annotations

import pytest
from deepspeed_provider.training import engines
from deepspeed_provider.training.failures import InputError
from deepspeed_provider.training.plan import MethodSettings

from training import tiny_runs


@pytest.mark.parametrize(
    ("family", "adapted"),
    [
        pytest.param("gpt2", {"c_attn", "c_fc", "c_proj"}, id="gpt2, whose layers are Conv1D"),
        pytest.param("bloom", {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}, id="bloom"),
        pytest.param("gpt_neo", {"q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"}, id="gpt_neo"),
        pytest.param("mamba", {"in_proj", "x_proj", "dt_proj"}, id="mamba, where out_proj takes none"),
    ],
)
def test_all_linear_is_every_layer_but_the_head(family: str, adapted: set[str]) -> None:
    model = engines.with_lora(tiny_runs.new_model_of(family), MethodSettings(name="lora", lora_rank=2))
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {name.split(".")[-4] for name in trainable} == adapted
    assert all(".lora_" in name for name in trainable)


def test_layers_that_are_not_there() -> None:
    with pytest.raises(InputError, match=r"lora_targets = \['q_proj'\]"):
        engines.with_lora(tiny_runs.new_model_of("gpt2"), MethodSettings(name="lora", lora_targets=("q_proj",)))
