# SPDX-License-Identifier: Apache-2.0
"""Tells configs of models that are no decoder-only causal language models, and says so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from deepspeed_provider.errors import FieldProblem, SpecError

_SECTIONS: Final = {
    "vision_config": "a vision-language model",
    "vision_tower": "a vision-language model",
    "visual": "a vision-language model",
    "mm_vision_tower": "a vision-language model",
    "image_token_id": "a vision-language model",
    "image_token_index": "a vision-language model",
    "audio_config": "an audio-language model",
    "encoder": "an encoder-decoder model",
    "decoder_layers": "an encoder-decoder model",
    "num_decoder_layers": "an encoder-decoder model",
    "state_size": "a state-space model",
    "ssm_cfg": "a state-space model",
}

_MODEL_TYPES: Final = (
    (
        "a vision or vision-language model",
        r"(_vl|_vl_moe|_vl_text|vision)$|llava|vit|clip|idefics|paligemma|mllama|blip|florence|pix2struct|kosmos"
        r"|^(gemma3|gemma3n|gemma4|llama4|smolvlm|fuyu|git|chameleon|emu3|janus|pixtral|mistral3|internvl|aria"
        r"|molmo2|beit|deit|swin.*|dinov2.*|convnext.*|resnet|detr|sam.*|donut|layoutlm.*|flava)$",
    ),
    (
        "an encoder-decoder model",
        r"^(t5|mt5|umt5|byt5|longt5|t5gemma.*|switch_transformers|bart|mbart|mbart50|plbart|pegasus.*|marian|led"
        r"|blenderbot.*|prophetnet|fsmt|m2m_100|nllb.*|encoder_decoder|encoder-decoder|bigbird_pegasus|udop)$",
    ),
    (
        "an encoder",
        r"bert|^(electra|deberta.*|xlm|xlnet|ernie|longformer|funnel|mpnet|canine|big_bird|esm|nystromformer"
        r"|fnet|rembert|luke|yoso|data2vec.*)$",
    ),
    (
        "an audio or speech model",
        r"^(whisper|wav2vec2.*|hubert|sew.*|speech.*|seamless.*|musicgen.*|bark|encodec|vits|audio.*|qwen2_audio"
        r"|voxtral.*|moonshine.*|wavlm|unispeech.*|clap|csm|dia|moshi)$",
    ),
    (
        "a state-space, recurrent or hybrid model",
        r"mamba|^(rwkv|recurrent_gemma|jamba|zamba.*|xlstm|bamba|falcon_h1|nemotron_h|granitemoehybrid|qwen3_next"
        r"|qwen3_5.*|lfm2.*|kimi_linear|reformer)$",
    ),
)

# Sections that say nothing of another modality.
_OWN: Final = frozenset({"text_config", "quantization_config", "generation_config", "attn_config"})

_WORKS: Final = (
    "Only decoder-only causal language models are sized (llama, mistral, mixtral, qwen2, qwen3, gemma, phi, falcon, "
    "gpt2, ...); give the text model's own config, or a parameter count."
)


def refuse_if_unsupported(config: Mapping[str, Any]) -> None:
    """Raise :class:`SpecError` for an encoder, a vision-language, speech or state-space model."""
    model_type = config.get("model_type")
    kind = _kind(config, str(model_type or ""))
    if kind is not None:
        problem = FieldProblem(
            field="model_type", value=model_type, problem=f"{kind} is not supported", suggestion=_WORKS
        )
        raise SpecError([problem])


def _kind(config: Mapping[str, Any], model_type: str) -> str | None:
    return _kind_by_type(model_type) or _kind_by_sections(config)


def _kind_by_type(model_type: str) -> str | None:
    return next((kind for kind, pattern in _MODEL_TYPES if re.search(pattern, model_type)), None)


def _kind_by_sections(config: Mapping[str, Any]) -> str | None:
    for section, kind in _SECTIONS.items():
        if config.get(section):
            return kind
    if config.get("is_encoder_decoder") is True:
        return "an encoder-decoder model"
    others = [
        name for name, value in config.items() if name.endswith("_config") and name not in _OWN and _is_model(value)
    ]
    return "a model of several parts" if "text_config" in config and others else None


def _is_model(section: Any) -> bool:
    return isinstance(section, Mapping) and bool(section)
