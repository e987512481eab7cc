# SPDX-License-Identifier: Apache-2.0
"""The real model code of transformers on the meta device: shapes without storage."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import transformers
from transformers.pytorch_utils import Conv1D


def build(config: dict[str, Any]) -> Any:
    return _build(json.dumps(config))


@cache
def _build(text: str) -> Any:
    settings = json.loads(text)
    settings.setdefault("pad_token_id", 0)  # the classes' defaults lie beyond a small vocabulary
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def parameters(module: Any) -> int:
    """Shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def layers(model: Any) -> Any:
    """The list of decoder layers: the model's longest module list outside any other."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=parameters)


def matrices(layer: Any) -> Counter[tuple[str, int, int, bool]]:
    """(name, in features, out features, bias) of the layer's linear modules."""
    found: Counter[tuple[str, int, int, bool]] = Counter()
    for name, module in layer.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, torch.nn.Linear):
            found[leaf, module.in_features, module.out_features, module.bias is not None] += 1
        elif isinstance(module, Conv1D):
            found[leaf, module.nx, module.nf, True] += 1
    return found


def bare_matrices(layer: Any) -> Counter[tuple[str, int, int, int]]:
    """(name, copies, in features, out features) of matrices that are parameters without a linear module."""
    found: Counter[tuple[str, int, int, int]] = Counter()
    for name, parameter in layer.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if parameter.ndim == 3:
            found[leaf, parameter.shape[0], parameter.shape[2], parameter.shape[1]] += 1
        elif parameter.ndim == 2 and "Router" in type(layer.get_submodule(owner)).__name__:
            found[owner.rpartition(".")[2], 1, parameter.shape[1], parameter.shape[0]] += 1
    return found


def norms(layer: Any) -> int:
    """How many norms of the whole width, those of queries and keys left out."""
    names = (name for name, module in layer.named_modules() if "Norm" in type(module).__name__)
    return sum(not any(part in name for part in ("q_", "k_")) for name in names)


def rotary_dim(model: Any) -> int | None:
    frequencies = [b for name, b in model.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    return 2 * frequencies[0].numel() if frequencies else None


def flat(counters: Iterable[Any]) -> list[Any]:
    return sorted(sorted(counter.items()) for counter in counters)
