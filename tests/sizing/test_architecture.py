# SPDX-License-Identifier: Apache-2.0
"""Architectures from config.json: exact counts of published models, older field names, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed_provider.errors import SpecError
from deepspeed_provider.sizing.architecture import Architecture, NormKind, QkNorm, Residual
from deepspeed_provider.sizing.families import architecture, from_parameter_count
from hypothesis import given
from hypothesis import strategies as st

DATA = Path(__file__).parent / "data"
PUBLISHED = json.loads((DATA / "model_configs.json").read_text())
MPT = json.loads((DATA / "mpt_parameters.json").read_text())

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MIXTRAL = PUBLISHED["mistralai/Mixtral-8x7B-v0.1"]["config"]


def module_weights(found: Architecture) -> int:
    return sum(layer.count * x.weights for layer in found.layers for x in layer.linears if x.is_module)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_exact_counts(name):
    row = PUBLISHED[name]
    found = architecture(row["config"])
    assert found.parameters == row["exact_params_meta"]
    assert found.tied_embeddings == row["tied"]
    assert found.warnings == ()
    if found.model_type != "gpt2":  # its matrices are Conv1D, which this column leaves out
        assert module_weights(found) == row["params_in_nn_linear_excl_lm_head"]


@pytest.mark.parametrize(
    ("name", "hidden", "width", "layers", "vocab"),
    [
        ("Qwen/Qwen-1_8B(as qwen2)", 2048, 11008, 24, 151936),
        ("Qwen/Qwen-7B(as qwen2)", 4096, 22016, 32, 151936),
        ("Qwen/Qwen-14B(as qwen2)", 5120, 27392, 40, 152064),
    ],
)
def test_the_first_qwen_counts_as_its_twin_in_transformers(name, hidden, width, layers, vocab):
    config = {
        "model_type": "qwen",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
    }
    assert architecture(config).parameters == PUBLISHED[name]["exact_params_meta"]


@pytest.mark.parametrize(("model", "seq_len", "n_params"), MPT["n_params"])
def test_mpt_as_its_makers_count_it(model, seq_len, n_params):
    """Biases and learned positions, which the published benchmark's models have and transformers' have not."""
    config = MPT["architectures"][f"mpt-{model}"]
    found = architecture({**config, "no_bias": False, "max_seq_len": seq_len, "attn_config": {"alibi": False}})
    assert found.parameters == n_params
    assert len(found.warnings) == 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(MIXTRAL, 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336, id="Mixtral: 12.9 billion of 46.7"),
        pytest.param(
            PUBLISHED["Qwen/Qwen3-30B-A3B"]["config"],
            30_532_122_624 - 48 * 120 * 3 * 2048 * 768,
            id="Qwen3: 3.35 billion of 30.5",
        ),
        pytest.param(LLAMA, architecture(LLAMA).parameters, id="without experts all are active"),
    ],
)
def test_active_parameters_leave_out_idle_experts(config, expected):
    assert architecture(config).active_parameters == expected


def test_expert_parameters_are_those_of_the_routed_experts():
    assert architecture(MIXTRAL).expert_parameters == 32 * 8 * 3 * 4096 * 14336


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        pytest.param(
            {
                "model_type": "RefinedWeb",
                "vocab_size": 128,
                "hidden_size": 64,
                "n_layer": 2,
                "n_head": 4,
                "n_head_kv": 2,
                "new_decoder_architecture": True,
            },
            {
                "model_type": "falcon",
                "vocab_size": 128,
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_kv_heads": 2,
                "new_decoder_architecture": True,
            },
            id="Falcon before it was in transformers",
        ),
        pytest.param(
            {"model_type": "mpt", "vocab_size": 128, "d_model": 64, "n_layers": 2, "n_heads": 4},
            {
                "model_type": "mpt",
                "vocab_size": 128,
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            },
            id="MPT",
        ),
        pytest.param(
            {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e4},
            {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            id="rope_scaling",
        ),
    ],
)
def test_older_field_names_mean_the_same(older, newer):
    assert architecture(older).parameters == architecture(newer).parameters
    assert architecture(older).rotary_dim == architecture(newer).rotary_dim


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        pytest.param(
            {**LLAMA, "model_type": "gemma2"},
            {
                "norm": NormKind.RMS_UNIT_OFFSET,
                "residual": Residual.SANDWICH,
                "logit_softcap": True,
                "attention_softcap": True,
                "embedding_scale": True,
                "activation": "gelu_pytorch_tanh",
            },
            id="gemma2",
        ),
        pytest.param(
            {**LLAMA, "model_type": "gemma2", "final_logit_softcapping": None, "attn_logit_softcapping": None},
            {"logit_softcap": False, "attention_softcap": False},
            id="gemma2 without softcaps",
        ),
        pytest.param(
            {**LLAMA, "model_type": "gemma3_text"},
            {"qk_norm": QkNorm.HEAD, "logit_softcap": False, "attention_softcap": False},
            id="gemma3",
        ),
        pytest.param(
            {**LLAMA, "model_type": "gemma", "num_key_value_heads": 4, "hidden_act": "gelu"},
            {"activation": "gelu_pytorch_tanh"},
            id="gemma's legacy gelu",
        ),
        pytest.param(
            {**LLAMA, "model_type": "olmo2"}, {"residual": Residual.POST, "qk_norm": QkNorm.WIDTH}, id="olmo2"
        ),
        pytest.param(
            {"model_type": "gpt2", "vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4},
            {
                "attention_dropout": 0.1,
                "hidden_dropout": 0.1,
                "embedding_dropout": 0.1,
                "rotary_dim": 0,
                "position_rows": 1024,
                "max_positions": 1024,
            },
            id="gpt2's dropouts",
        ),
        pytest.param(
            PUBLISHED["microsoft/phi-2"]["config"],
            {"residual": Residual.PARALLEL, "rotary_dim": 32, "head_bias": True, "gated_mlp": False},
            id="phi",
        ),
        pytest.param(
            PUBLISHED["facebook/opt-13b"]["config"],
            {"position_rows": 2050, "hidden_dropout": 0.1, "activation": "relu"},
            id="opt",
        ),
        pytest.param(
            PUBLISHED["bigscience/bloom"]["config"],
            {"alibi": True, "embedding_norm_parameters": 2 * 14336, "rotary_dim": 0},
            id="bloom",
        ),
    ],
)
def test_what_activations_depend_on(config, fields):
    found = architecture(config)
    assert {name: getattr(found, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        pytest.param(
            {"hidden_size": None, "num_hidden_layers": "32", "vocab_size": 0},
            {"hidden_size": None, "num_hidden_layers": "32", "vocab_size": 0},
            id="three at once",
        ),
        pytest.param({"num_attention_heads": 2.5}, {"num_attention_heads": 2.5}, id="not whole"),
        pytest.param({"num_attention_heads": True}, {"num_attention_heads": True}, id="a boolean"),
        pytest.param({"num_attention_heads": 5}, {"num_attention_heads": 5}, id="heads do not divide the width"),
        pytest.param({"num_key_value_heads": 3}, {"num_key_value_heads": 3}, id="groups do not divide the heads"),
        pytest.param({"tie_word_embeddings": "yes"}, {"tie_word_embeddings": "yes"}, id="no flag"),
        pytest.param(
            {"attention_dropout": "much", "hidden_act": 3},
            {"attention_dropout": "much", "hidden_act": 3},
            id="no number, no name",
        ),
        pytest.param({"model_type": "phi3", "rope_scaling": "su"}, {"rope_scaling": "su"}, id="no object"),
        pytest.param(
            {"model_type": "qwen3_moe", "mlp_only_layers": "all"}, {"mlp_only_layers": "all"}, id="no list of layers"
        ),
    ],
)
def test_all_problems_are_named_at_once(change, problems):
    with pytest.raises(SpecError) as caught:
        architecture({**LLAMA, **change})
    assert {problem.field: problem.value for problem in caught.value.problems} == problems
    assert all(problem.suggestion for problem in caught.value.problems)


def test_a_missing_field_is_named_with_what_would_work():
    config = {name: value for name, value in LLAMA.items() if name != "num_hidden_layers"}
    with pytest.raises(SpecError, match=r"num_hidden_layers = None: is missing.*whole number.*n_layer"):
        architecture(config)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12}, id="bert"),
        pytest.param({"model_type": "modernbert"}, id="modernbert"),
        pytest.param({"model_type": "t5", "is_encoder_decoder": True, "d_model": 512}, id="t5"),
        pytest.param({"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}}, id="llava"),
        pytest.param({**LLAMA, "model_type": "qwen2_vl", "vision_config": {"depth": 32}}, id="qwen2_vl"),
        pytest.param({**LLAMA, "model_type": "qwen2_5_vl"}, id="qwen2_5_vl"),
        pytest.param({"model_type": "clip"}, id="clip"),
        pytest.param({"model_type": "vit", "hidden_size": 768}, id="vit"),
        pytest.param({"model_type": "whisper"}, id="whisper"),
        pytest.param({"model_type": "mamba", "hidden_size": 768, "state_size": 16}, id="mamba"),
        pytest.param({"model_type": "gemma3", "text_config": LLAMA, "vision_config": {"depth": 2}}, id="gemma3"),
        pytest.param(
            {"model_type": "granite_speech", "text_config": LLAMA, "encoder_config": {"hidden_dim": 8}}, id="speech"
        ),
        pytest.param({**LLAMA, "model_type": "somebody's", "vision_config": {"depth": 2}}, id="unknown, with eyes"),
        pytest.param({**LLAMA, "model_type": "somebody's", "is_encoder_decoder": True}, id="unknown, with encoder"),
    ],
)
def test_other_models_are_refused_by_name(config):
    with pytest.raises(SpecError, match=r"is not supported.*decoder-only causal") as caught:
        architecture(config)
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == ("model_type", config["model_type"])


@pytest.mark.parametrize("config", [{}, {"model_type": "resnext"}, {"model_type": None, "hidden_size": 12}])
def test_what_is_no_decoder_is_refused(config):
    with pytest.raises(SpecError, match="model_type"):
        architecture(config)


def test_a_nested_text_config_is_read():
    assert architecture({"model_type": "wrapper", "text_config": LLAMA}) == architecture(LLAMA)


def test_an_unknown_decoder_is_sized_as_llama_and_says_so():
    found = architecture({**LLAMA, "model_type": "newcomer"})
    assert found.parameters == architecture(LLAMA).parameters
    assert "'newcomer'" in found.warnings[0]
    assert "estimate" in found.warnings[0]


@pytest.mark.parametrize(
    ("more", "head_dim"),
    [
        pytest.param({"num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 24}, 24, id="told"),
        pytest.param({"num_attention_heads": 3, "num_key_value_heads": 3}, 22, id="rounded up"),
    ],
)
def test_heads_of_an_unknown_decoder_need_not_divide_its_width(more, head_dim):
    config = {name: value for name, value in LLAMA.items() if name != "head_dim"}
    found = architecture({**config, "model_type": "newcomer", **more})
    assert found.head_dim == head_dim
    assert found.layers[0].linear("o").in_features == 3 * head_dim


def test_an_unknown_decoder_that_is_no_mixture_has_no_experts():
    found = architecture({**LLAMA, "model_type": "newcomer", "num_experts": 16384, "is_moe": False})
    assert found.parameters == architecture(LLAMA).parameters


def test_an_unknown_mixture_is_sized_with_its_experts():
    config: dict[str, Any] = {
        **LLAMA,
        "model_type": "newcomer",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
    found = architecture(config)
    assert [layer.count for layer in found.layers] == [1, 1]
    assert found.expert_parameters == 4 * 3 * 64 * 32
    assert found.layers[1].linear("shared_up") is not None
    assert "mixture" in found.warnings[0]


@given(parameters=st.integers(130_000_000, 2_000_000_000_000))
def test_a_parameter_count_alone_is_kept_exactly(parameters):
    found = from_parameter_count(parameters)
    assert found.parameters == parameters
    assert str(parameters) in found.warnings[0]


@pytest.mark.parametrize(
    ("parameters", "hidden", "layers"),
    [(1_236_000_000, 2048, 16), (6_738_000_000, 4096, 32), (13_016_000_000, 5120, 40), (68_977_000_000, 8192, 80)],
    ids=["1B", "Llama 2 7B", "Llama 2 13B", "Llama 2 70B"],
)
def test_the_assumed_shape_is_near_that_of_published_models(parameters, hidden, layers):
    found = from_parameter_count(parameters, vocab_size=32_000)
    assert found.hidden_size == pytest.approx(hidden, rel=0.15)
    assert found.num_layers == pytest.approx(layers, rel=0.2)


@pytest.mark.parametrize("parameters", [0, -7, 999_999, 7.5e9, True, "7B", 5_000_000])
def test_unusable_parameter_counts_are_refused(parameters):
    with pytest.raises(SpecError, match="parameters"):
        from_parameter_count(parameters)
