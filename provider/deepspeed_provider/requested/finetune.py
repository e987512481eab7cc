# SPDX-License-Identifier: Apache-2.0
"""The request for a plan that a fine-tune's spec makes by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from deepspeed_provider.errors import SpecError
from deepspeed_provider.requested.model_source import ModelSource
from deepspeed_provider.requested.plan import EFFECTIVE_BATCH_SIZE, planned
from deepspeed_provider.spec import FineTuneSpec, Method

# Batches are padded to their longest row (``training/data.py``), and of the model's output only the loss lives on
# (``training/causal_lm.py``).
OF_OUR_TRAINING: Final[Mapping[str, Any]] = {"padding": "longest", "holds_outputs": False}
# What only the model and the data tell; whether to download is no option of the plan itself.
OF_WHAT_IS_TRAINED: Final = ("model", "parameters", "tokens", "rows", "lora_targets", "download")


def request_for(spec: FineTuneSpec, dataset: Mapping[str, Any] | str) -> dict[str, Any]:
    """Options of a plan by their names, from what is trained and for how long.

    ``dataset``: its manifest, which counts its rows, or an address, which does not: then a spec in epochs leaves
    ``rows`` out.
    """
    request: dict[str, Any] = {
        "model": spec.model,
        "method": spec.method.value,
        "sequence_length": spec.sequence_length,
        "effective_batch_size": spec.effective_batch_size,
        "rows": _rows(spec, dataset),
        **OF_OUR_TRAINING,
    }
    if spec.method is Method.LORA:
        request |= {
            "lora_rank": spec.lora_rank,
            "lora_targets": list(spec.lora_targets),
            "lora_dropout": spec.lora_dropout,
        }
    return {name: value for name, value in request.items() if value is not None}


def planning_request(
    spec: FineTuneSpec, dataset: Mapping[str, Any] | str, plan_options: Mapping[str, Any]
) -> dict[str, Any]:
    """The same with a plan's further options, which go first; whether to download is not among them."""
    request = {**request_for(spec, dataset), **plan_options}
    request.pop("download", None)
    if "parameters" in plan_options:
        request.pop("model")
    return request


def require_options(plan_options: Mapping[str, Any]) -> None:
    """Raises :class:`SpecError` for all that is wrong with a plan's further options, whatever is trained.

    They are tried on a model of a common size.
    """
    others = {name: value for name, value in plan_options.items() if name not in OF_WHAT_IS_TRAINED}
    try:
        planned({"parameters": "1B", "rows": 1, **others}, ModelSource())
    except SpecError as error:
        raise SpecError([replace(each, field=f"plan_options.{each.field}") for each in error.problems]) from None


def _rows(spec: FineTuneSpec, dataset: Mapping[str, Any] | str) -> int | None:
    """Sequences of the whole run."""
    max_steps, epochs = spec.length
    if max_steps is not None:
        return max_steps * (spec.effective_batch_size or EFFECTIVE_BATCH_SIZE)
    train = {} if isinstance(dataset, str) else (dataset.get("splits") or {}).get("train") or {}
    return math.ceil((epochs or 1.0) * train["rows"]) if train.get("rows") else None
