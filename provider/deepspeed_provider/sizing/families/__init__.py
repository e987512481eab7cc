# SPDX-License-Identifier: Apache-2.0
"""An :class:`Architecture` from a Hugging Face config.json, one reader for each kin of models.

The readers follow the configuration classes (defaults, older names of fields) and the modeling
files (modules, shapes, biases) of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.families import estimate, experts, falcon, gpt, llama, phi
from deepspeed_provider.sizing.families.estimate import from_parameter_count
from deepspeed_provider.sizing.families.fields import ConfigFields
from deepspeed_provider.sizing.families.unsupported import refuse_if_unsupported

__all__ = ["READERS", "architecture", "from_parameter_count"]

READERS: Final[Mapping[str, Callable[[ConfigFields], Architecture]]] = MappingProxyType(
    {
        **dict.fromkeys(llama.KIN, llama.read),
        "qwen": llama.read_first_qwen,
        "mixtral": experts.read_mixtral,
        "qwen2_moe": experts.read_qwen2_moe,
        "qwen3_moe": experts.read_qwen3_moe,
        "phi": phi.read_phi,
        "phi3": phi.read_phi3,
        "starcoder2": phi.read_starcoder2,
        "stablelm": phi.read_stablelm,
        "glm": phi.read_glm,
        "glm4": phi.read_glm,
        "falcon": falcon.read,
        "RefinedWebModel": falcon.read,
        "RefinedWeb": falcon.read,
        "mpt": gpt.read_mpt,
        "gpt_neox": gpt.read_gpt_neox,
        "gpt2": gpt.read_gpt2,
        "gpt_bigcode": gpt.read_gpt2,
        "gpt_neo": gpt.read_gpt_neo,
        "gptj": gpt.read_gptj,
        "opt": gpt.read_opt,
        "bloom": gpt.read_bloom,
    }
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json describes.

    A model type without a reader of its own is sized as Llama, with a warning in
    ``Architecture.warnings``. Raises :class:`SpecError`, all problems at once, for missing or
    unusable fields, and for models that are no decoder-only causal language models.
    """
    config = _text_config(config)
    refuse_if_unsupported(config)
    fields = ConfigFields(config)
    reader = READERS.get(fields.model_type)
    if reader is None:
        if not estimate.looks_like_decoder(config):
            raise SpecError([_unknown(config)])
        reader = estimate.read_unknown
    found = reader(fields)
    fields.finish()
    return found


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested text config of a causal language model that has no other modality."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and str(config.get("model_type")) not in READERS and "hidden_size" not in config:
        refuse_if_unsupported(config)
        return inner
    return config


def _unknown(config: Mapping[str, Any]) -> FieldProblem:
    return FieldProblem(
        field="model_type",
        value=config.get("model_type"),
        problem="is no model type that can be read, nor does the config look like a decoder's",
        suggestion=(
            f"Known are {', '.join(sorted(READERS))}; any other decoder needs hidden_size, num_hidden_layers,"
            " num_attention_heads and vocab_size."
        ),
    )
