# SPDX-License-Identifier: Apache-2.0
"""Adapters: published counts, and PEFT itself on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from deepspeed_provider.errors import SpecError
from deepspeed_provider.sizing.decoder import layer_tape
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.gpu import mode
from deepspeed_provider.sizing.lora import adapters, embedding_projections
from deepspeed_provider.sizing.options import parse_options
from deepspeed_provider.sizing.weights import weights

PUBLISHED = json.loads((Path(__file__).parent / "data" / "model_configs.json").read_text())
ALL_SEVEN = "q,k,v,o,gate,up,down"


@pytest.mark.parametrize(
    ("model", "targets", "expected"),
    [
        ("meta-llama/Llama-2-7b-hf", "q,v", 8_388_608),
        ("meta-llama/Llama-2-7b-hf", "q,k,v,o", 16_777_216),
        ("meta-llama/Llama-2-7b-hf", "all-linear", 39_976_960),
        ("meta-llama/Llama-2-7b-hf", ALL_SEVEN, 39_976_960),
        ("meta-llama/Meta-Llama-3-8B", "q,v", 6_815_744),
        ("meta-llama/Meta-Llama-3-8B", "all-linear", 41_943_040),
        ("Qwen/Qwen2.5-7B", "q_proj,v_proj", 5_046_272),
        ("Qwen/Qwen2.5-7B", "all-linear", 40_370_176),
        ("tiiuae/falcon-7b", "q,k,v", 4_718_592),
        ("tiiuae/falcon-7b", "query_key_value", 4_718_592),
        ("microsoft/Phi-3-mini-4k-instruct", "all-linear", 25_165_824),
        ("microsoft/Phi-3-mini-4k-instruct", ALL_SEVEN, 25_165_824),
        ("google/gemma-2-9b", "all-linear", 54_018_048),
        ("mistralai/Mixtral-8x7B-v0.1", "q,k,v,o", 13_631_488),
        ("mistralai/Mixtral-8x7B-v0.1", "all-linear", 359_665_664),
        ("Qwen/Qwen3-30B-A3B", "all-linear", 996_507_648),
    ],
)
def test_published_counts_at_rank_16(model, targets, expected):
    assert adapters(architecture(PUBLISHED[model]["config"]), rank=16, targets=targets).parameters == expected


SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
GATED = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "pad_token_id": 0}
MOE = {**GATED, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **GATED},
    "qwen3": {"model_type": "qwen3", **GATED, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **GATED},
    "phi": {"model_type": "phi", **GATED},
    "phi3": {"model_type": "phi3", **GATED},
    "falcon": {"model_type": "falcon", **SIZES},
    "gpt_neox": {"model_type": "gpt_neox", **SIZES, "intermediate_size": 96},
    "gpt2": {"model_type": "gpt2", "vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4},
    "mpt": {"model_type": "mpt", "vocab_size": 128, "d_model": 64, "n_layers": 3, "n_heads": 4},
    "bloom": {"model_type": "bloom", "vocab_size": 128, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "starcoder2": {"model_type": "starcoder2", **GATED},
    "opt_350m": {
        "model_type": "opt",
        **SIZES,
        "pad_token_id": 0,
        "ffn_dim": 96,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
    },
    "mixtral": {"model_type": "mixtral", **GATED, "num_local_experts": 4},
    "qwen2_moe": {"model_type": "qwen2_moe", **MOE, "shared_expert_intermediate_size": 80, "mlp_only_layers": [1]},
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE, "head_dim": 16, "mlp_only_layers": [1]},
}


def counted_by_peft(config: dict[str, Any], targets: str | list[str], rank: int) -> int:
    settings = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **settings)
        )
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM"))
    return sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("name", TINY)
def test_all_linear_is_what_peft_adapts(name):
    found = adapters(architecture(TINY[name]), rank=4, targets="all-linear")
    assert found.parameters == counted_by_peft(TINY[name], "all-linear", 4)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ["q_proj", "v_proj"]),
        ("phi3", ["qkv_proj", "down_proj"]),
        ("gpt2", ["c_attn", "c_proj"]),
        ("phi", ["fc1", "dense"]),
        ("opt_350m", ["project_in", "fc2"]),
        ("mixtral", ["q_proj", "w1", "w2", "w3"]),
        ("mixtral", ["k_proj", "w2"]),
        ("qwen3_moe", ["gate_proj", "up_proj", "down_proj"]),
        ("qwen3_moe", ["o_proj", "down_proj"]),
        ("qwen2_moe", ["gate_proj", "up_proj", "down_proj"]),
        ("qwen2_moe", ["shared_expert_gate"]),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_module_names_hit_what_peft_hits(name, targets):
    found = adapters(architecture(TINY[name]), rank=8, targets=targets)
    assert found.parameters == counted_by_peft(TINY[name], targets, 8)


def test_fused_experts_carry_twice_the_rank_beside_gate_and_up():
    model = architecture(TINY["mixtral"])
    found = adapters(model, rank=4, targets=ALL_SEVEN)
    gate_up, down = model.layers[0].linear("gate_up"), model.layers[0].linear("down")
    assert gate_up is not None
    assert down is not None
    assert (found.rank_of(gate_up), found.rank_of(down)) == (8, 4)
    assert found.parameters_of(down) == 4 * 4 * (96 + 64)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_experts_without_adapters_keep_no_copies_of_their_matrices(name):
    """Beside dense layers whose ``down`` has one."""
    options = parse_options({"method": "lora", "lora_targets": "down", "sequence_length": 32})

    def layers(config):
        found = architecture(config)
        how = mode(found, weights(found, options), options)
        return [layer_tape(found, layer, how).run() for layer in found.layers if layer.experts]

    alone = {**TINY[name], "mlp_only_layers": []}
    assert {str(each) for each in layers(TINY[name])} == {str(each) for each in layers(alone)}


def test_parts_add_up():
    model = architecture(TINY["opt_350m"])
    found = adapters(model, rank=4, targets="all-linear")
    parts = [layer.count * found.parameters_of(linear) for layer in model.layers for linear in layer.linears]
    outside = [found.parameters_of(linear) for linear in embedding_projections(model)]
    assert sum(parts) + sum(outside) == found.parameters
    assert found.names == ("fc1", "fc2", "k_proj", "out_proj", "project_in", "project_out", "q_proj", "v_proj")


@pytest.mark.parametrize("alias", ["q", "k", "v"])
def test_a_fused_matrix_is_hit_once_whatever_part_is_asked_for(alias):
    model = architecture(TINY["phi3"])
    assert adapters(model, rank=4, targets=alias) == adapters(model, rank=4, targets="q,k,v")


def test_an_alias_that_the_model_lacks_adapts_nothing_and_says_so():
    model = architecture(TINY["gpt2"])
    found = adapters(model, rank=4, targets=ALL_SEVEN)
    assert found.parameters == adapters(model, rank=4, targets="all-linear").parameters
    assert found.warnings == ("This model has no gate projection: that target adapts nothing.",)


def test_experts_that_peft_leaves_out_are_named():
    assert "routed experts" in adapters(architecture(TINY["qwen2_moe"]), rank=4, targets="all-linear").warnings[0]
    assert not adapters(architecture(TINY["qwen2_moe"]), rank=4, targets="q,v").warnings


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        pytest.param(
            "llama", "q_proj,c_attn", r"lora_targets = 'c_attn'.*q_proj, up_proj, v_proj", id="another's name"
        ),
        pytest.param("gpt2", "q_proj,v_proj", r"(?s)'q_proj'.*'v_proj'", id="all unknown ones at once"),
        pytest.param("gpt2", "gate", r"lora_targets = 'gate'.*c_attn", id="nothing left"),
        pytest.param("llama", "", "lora_targets", id="none"),
        pytest.param("mixtral", "w1", "w1 and w3", id="half of a fused pair"),
        pytest.param("mixtral", "gate", "w1 and w3", id="gate alone"),
    ],
)
def test_unusable_targets_are_refused_with_those_that_would_work(name, targets, message):
    with pytest.raises(SpecError, match=message):
        adapters(architecture(TINY[name]), rank=4, targets=targets)


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "16"])
def test_unusable_ranks_are_refused(rank):
    with pytest.raises(SpecError, match="lora_rank"):
        adapters(architecture(TINY["llama"]), rank=rank, targets="q")
