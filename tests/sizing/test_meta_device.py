# SPDX-License-Identifier: Apache-2.0
"""Every architecture that is read, against the model that transformers builds from the same config."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from deepspeed_provider.sizing.architecture import Architecture, Layer
from deepspeed_provider.sizing.families import READERS, architecture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sizing import meta_models

SPLIT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GQA = {**SPLIT, "num_key_value_heads": 2}
GPT = {"vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4}
OPT = {"vocab_size": 128, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
BLOOM = {"vocab_size": 128, "hidden_size": 64, "n_layer": 3, "n_head": 4}
MPT = {"vocab_size": 128, "d_model": 64, "n_layers": 3, "n_heads": 4}
FALCON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
EXPERTS = {**GQA, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}

CASES: dict[str, dict[str, Any]] = {
    "llama: MHA": {"model_type": "llama", **SPLIT},
    "llama: GQA, tied": {"model_type": "llama", **GQA, "tie_word_embeddings": True},
    "llama: biases": {"model_type": "llama", **GQA, "attention_bias": True, "mlp_bias": True},
    "llama: own head_dim": {"model_type": "llama", **GQA, "head_dim": 24},
    "llama: null fields": {"model_type": "llama", **SPLIT, "num_key_value_heads": None, "head_dim": None},
    "mistral": {"model_type": "mistral", **GQA},
    "mistral: own head_dim": {"model_type": "mistral", **GQA, "head_dim": 32, "tie_word_embeddings": True},
    "mistral: default key-value heads": {"model_type": "mistral", **SPLIT, "num_attention_heads": 8},
    "ministral": {"model_type": "ministral", **GQA, "head_dim": 16},
    "ministral3": {"model_type": "ministral3", **GQA},
    "mixtral": {"model_type": "mixtral", **GQA, "num_local_experts": 4},
    "mixtral: default experts": {"model_type": "mixtral", **GQA, "head_dim": 32},
    "qwen2": {"model_type": "qwen2", **GQA},
    "qwen2: null key-value heads": {"model_type": "qwen2", **SPLIT, "num_key_value_heads": None},
    "qwen2: tied": {"model_type": "qwen2", **GQA, "tie_word_embeddings": True},
    "qwen2_moe": {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 80},
    "qwen2_moe: no qkv bias, every second layer dense": {
        "model_type": "qwen2_moe",
        **EXPERTS,
        "qkv_bias": False,
        "decoder_sparse_step": 2,
    },
    "qwen3": {"model_type": "qwen3", **GQA},
    "qwen3: bias, tied": {
        "model_type": "qwen3",
        **GQA,
        "head_dim": 16,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "head_dim": 32},
    "qwen3_moe: dense layers, head_dim left out": {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [0, 2]},
    "gemma": {"model_type": "gemma", **GQA},
    "gemma: untied, bias": {
        "model_type": "gemma",
        **GQA,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "gemma2": {"model_type": "gemma2", **GQA},
    "gemma2: bias, head_dim": {"model_type": "gemma2", **GQA, "head_dim": 16, "attention_bias": True},
    "gemma3_text": {"model_type": "gemma3_text", **GQA},
    "gemma3_text: only what differs": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
    },
    "phi": {"model_type": "phi", **SPLIT},
    "phi: GQA, query-key norm, rotary 0.25": {
        "model_type": "phi",
        **GQA,
        "qk_layernorm": True,
        "partial_rotary_factor": 0.25,
    },
    "phi: rope_parameters": {
        "model_type": "phi",
        **SPLIT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    },
    "phi3": {"model_type": "phi3", **GQA},
    "phi3: partial rotary, tied": {
        "model_type": "phi3",
        **GQA,
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
    },
    "falcon: 7B": {"model_type": "falcon", **FALCON},
    "falcon: 40B": {"model_type": "falcon", **FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon: 11B, one norm, untied": {
        "model_type": "falcon",
        **FALCON,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "ffn_hidden_size": 128,
        "tie_word_embeddings": False,
    },
    "falcon: RW, ALiBi, biases, serial": {
        "model_type": "falcon",
        **FALCON,
        "alibi": True,
        "bias": True,
        "multi_query": False,
        "parallel_attn": False,
    },
    "mpt": {"model_type": "mpt", **MPT},
    "mpt: untied, attn_config": {
        "model_type": "mpt",
        **MPT,
        "tie_word_embeddings": False,
        "attn_config": {"attn_pdrop": 0, "alibi": True},
    },
    "gpt_neox": {"model_type": "gpt_neox", **SPLIT},
    "gpt_neox: serial, no bias, rotary_pct": {
        "model_type": "gpt_neox",
        **SPLIT,
        "use_parallel_residual": False,
        "attention_bias": False,
        "rotary_pct": 1.0,
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2", **GPT, "n_positions": 48},
    "gpt2: n_inner, untied": {"model_type": "gpt2", **GPT, "n_inner": 96, "tie_word_embeddings": False},
    "gpt2: newer names": {"model_type": "gpt2", **{k: v for k, v in SPLIT.items() if k != "intermediate_size"}},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **GPT},
    "gpt_bigcode: all heads": {"model_type": "gpt_bigcode", **GPT, "multi_query": False, "n_inner": 96},
    "gptj": {"model_type": "gptj", **GPT, "rotary_dim": 8},
    "starcoder2": {"model_type": "starcoder2", **GQA},
    "starcoder2: no bias, untied": {"model_type": "starcoder2", **GQA, "use_bias": False, "tie_word_embeddings": False},
    "olmo2": {"model_type": "olmo2", **GQA},
    "olmo2: bias": {"model_type": "olmo2", **SPLIT, "attention_bias": True, "tie_word_embeddings": True},
    "olmo3": {"model_type": "olmo3", **GQA},
    "olmo": {"model_type": "olmo", **GQA},
    "cohere": {"model_type": "cohere", **GQA},
    "cohere: query-key norm, bias": {"model_type": "cohere", **GQA, "use_qk_norm": True, "attention_bias": True},
    "cohere2": {"model_type": "cohere2", **GQA},
    "gpt_neo": {
        "model_type": "gpt_neo",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 48,
        "attention_types": [[["global", "local"], 1]],
    },
    "smollm3": {"model_type": "smollm3", **GQA},
    "smollm3: biases": {
        "model_type": "smollm3",
        **GQA,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "granite": {"model_type": "granite", **GQA, "mlp_bias": True},
    "stablelm": {"model_type": "stablelm", **GQA},
    "stablelm: parallel, biases, query-key norm": {
        "model_type": "stablelm",
        **GQA,
        "use_parallel_residual": True,
        "use_qkv_bias": True,
        "qk_layernorm": True,
    },
    "glm": {"model_type": "glm", **GQA},
    "glm4": {"model_type": "glm4", **GQA, "head_dim": 16, "attention_bias": False},
    "opt": {"model_type": "opt", **OPT, "max_position_embeddings": 32},
    "opt: 350M": {"model_type": "opt", **OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "opt: no biases, bare norms": {
        "model_type": "opt",
        **OPT,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "tie_word_embeddings": False,
    },
    "opt: final norm removed": {"model_type": "opt", **OPT, "_remove_final_layer_norm": True},
    "bloom": {"model_type": "bloom", **BLOOM},
    "bloom: n_embed, untied": {
        "model_type": "bloom",
        "vocab_size": 128,
        "n_embed": 32,
        "n_layer": 2,
        "n_head": 4,
        "tie_word_embeddings": False,
    },
}

REAL: dict[str, dict[str, Any]] = {
    "Llama 3.2 1B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "OPT 350M": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    },
    "Falcon 40B": {
        "model_type": "falcon",
        "vocab_size": 65024,
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    },
}


def assert_equal_to_transformers(config: dict[str, Any]) -> None:
    found = architecture(config)
    model = meta_models.build(config)
    assert found.parameters == meta_models.parameters(model)
    assert found.token_embedding_parameters == model.get_input_embeddings().weight.numel()
    assert found.tied_embeddings == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert found.head_bias == (model.get_output_embeddings().bias is not None)
    assert_equal_layers(found, meta_models.layers(model))
    rotary = meta_models.rotary_dim(model)
    # Falcon makes the frequencies, and leaves them unused, with ALiBi too.
    assert rotary is None or rotary == found.rotary_dim or found.alibi
    assert_equal_settings(found, model.config)


def assert_equal_settings(found: Architecture, config: Any) -> None:
    """Activation, dropouts and positions, absent fields included."""
    attention = getattr(config, "attn_config", config)
    dropouts = [getattr(attention, name, None) for name in ("attention_dropout", "attn_pdrop")]
    assert found.attention_dropout in dropouts
    activations = ("hidden_act", "hidden_activation", "activation_function", "activation")
    assert found.activation in {getattr(config, name, found.activation) for name in activations}
    assert found.max_positions == getattr(config, "max_position_embeddings", found.max_positions)


def assert_equal_layers(found: Architecture, layers: Any) -> None:
    ours = [layer for layer in found.layers for _ in range(layer.count)]
    assert sorted(layer.parameters for layer in ours) == sorted(meta_models.parameters(layer) for layer in layers)
    assert {layer.num_norms for layer in ours} == {meta_models.norms(layer) for layer in layers}
    assert meta_models.flat(map(modules, ours)) == meta_models.flat(map(meta_models.matrices, layers))
    assert meta_models.flat(map(bare, ours)) == meta_models.flat(map(meta_models.bare_matrices, layers))


def modules(layer: Layer) -> Counter[tuple[str, int, int, bool]]:
    return Counter((x.module, x.in_features, x.out_features, x.bias) for x in layer.linears if x.is_module)


def bare(layer: Layer) -> Counter[tuple[str, int, int, int]]:
    return Counter((x.module, x.copies, x.in_features, x.out_features) for x in layer.linears if not x.is_module)


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in CASES.items()])
def test_counts_names_and_shapes_equal_transformers(config):
    assert_equal_to_transformers(config)


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in REAL.items()])
def test_real_models_equal_transformers(config):
    assert_equal_to_transformers(config)


def test_every_reader_is_compared():
    without_a_class = {"RefinedWeb", "RefinedWebModel", "qwen"}
    assert {config["model_type"] for config in CASES.values()} == set(READERS) - without_a_class


@st.composite
def llama_like(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    config = {
        "model_type": draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gemma2", "olmo2", "phi3"])),
        "vocab_size": draw(st.integers(16, 300)),
        "hidden_size": heads * 2 * draw(st.integers(1, 12)),
        "intermediate_size": draw(st.integers(1, 200)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": draw(st.booleans()),
    }
    if draw(st.booleans()):
        config["head_dim"] = 2 * draw(st.integers(1, 20))
    if draw(st.booleans()) and config["model_type"] not in ("mistral", "qwen2", "phi3"):
        config["attention_bias"] = draw(st.booleans())
    return config


@given(config=llama_like())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_random_configs_count_as_transformers_builds_them(config):
    assert_equal_to_transformers(config)
