# SPDX-License-Identifier: Apache-2.0
"""Save the trained model whole, read it back from disk, and believe it only if it answers the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import models, storage
from .data import Example
from .engines import zero_stage
from .heldout import local_loss
from .plan import TrainingPlan
from .ranks import Rank

log = logging.getLogger(__name__)

# Largest difference of the mean loss per token between the engine and the model read back. 16-bit weights
# are rounded once more when an adapter is merged into them, and the reload runs on the CPU.
LOSS_TOLERANCE = {"fp32": 2e-3, "bf16": 5e-2, "fp16": 5e-2}
PROBE_ROWS = 2


class SavedModelDiffers(RuntimeError):
    """What was read back from disk does not compute what was trained."""


def save_and_verify(
    plan: TrainingPlan, rank: Rank, engine: Any, tokenizer: Any, *, base: Path, probe: Sequence[Example]
) -> dict[str, Any]:
    """Save into ``output_uri/model`` and verify. All ranks call it; rank 0 writes.

    Args:
        base: folder of the model that training started from.
        probe: held-out rows whose loss is compared; any number in any rank, rank 0's count.

    Raises:
        SavedModelDiffers: in rank 0.
    """
    pad_token_id = tokenizer.pad_token_id
    probe = probe[:PROBE_ROWS]
    trained_loss = _mean(local_loss(engine, [probe], pad_token_id=pad_token_id, device=rank.device))
    weights = gather_weights(engine, stage=zero_stage(plan), trainable_only=plan.method.name == "lora", rank=rank)
    if not rank.is_first:
        return {}
    model_uri = storage.join(plan.output_uri, "model")
    with storage.folder_to_write(model_uri) as folder:
        if plan.method.name == "lora":
            _save_lora(plan, engine.module, weights, base=base, folder=folder)
        else:
            engine.module.config.use_cache = True
            engine.module.save_pretrained(str(folder), state_dict=weights)
        tokenizer.save_pretrained(str(folder))
        del weights
        reloaded = models.load_finished(folder, plan.model, plan.cache_uri)
        saved_loss = _mean(local_loss(reloaded, [probe], pad_token_id=pad_token_id, device="cpu"))
    tolerance = LOSS_TOLERANCE[plan.model.precision]
    if not abs(saved_loss - trained_loss) <= tolerance:
        raise SavedModelDiffers(
            f"the model saved in {model_uri} has loss {saved_loss:.6f} on a held-out batch, but the trained one had "
            f"{trained_loss:.6f} (tolerance {tolerance}). It is not handed on."
        )
    verification = {"trained_loss": trained_loss, "saved_loss": saved_loss, "tolerance": tolerance}
    return {"model_uri": model_uri, "adapter": models.is_adapter(folder), "verification": verification}


def gather_weights(engine: Any, *, stage: int, trainable_only: bool, rank: Rank) -> dict[str, Any]:
    """Whole weights by name, on the CPU of rank 0; empty in other ranks. A collective at ZeRO stage 3."""
    import contextlib

    import deepspeed

    weights: dict[str, Any] = {}
    copies: dict[int, Any] = {}
    # With duplicates: tied weights have two names, and savers recognise them by their shared storage.
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if trainable_only and not parameter.requires_grad:
            continue
        gathered = deepspeed.zero.GatheredParameters([parameter]) if stage == 3 else contextlib.nullcontext()
        with gathered:
            if rank.is_first:
                if id(parameter) not in copies:
                    copies[id(parameter)] = parameter.detach().to("cpu", copy=True)
                weights[name] = copies[id(parameter)]
    if rank.is_first and not trainable_only:
        persistent = engine.module.state_dict().keys()
        buffers = {name: value for name, value in engine.module.named_buffers() if name in persistent}
        weights.update({name: value.detach().to("cpu", copy=True) for name, value in buffers.items()})
    return weights


def _save_lora(plan: TrainingPlan, trained: Any, weights: dict[str, Any], *, base: Path, folder: Path) -> None:
    """The adapter on a fresh copy of its base: in ZeRO-3 the trained one has no weights of its own."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    settings = trained.peft_config["default"]
    adapter = get_peft_model_state_dict(trained, state_dict=weights)
    fresh = get_peft_model(models.load_model(base, plan.model), settings, autocast_adapter_dtype=False)
    outcome: Any = set_peft_model_state_dict(fresh, adapter)
    if outcome.unexpected_keys:
        raise SavedModelDiffers(f"the adapter does not fit its base model: {outcome.unexpected_keys[:3]} …")
    if plan.merge_adapter:
        merged = fresh.merge_and_unload()
        merged.config.use_cache = True
        merged.save_pretrained(str(folder))
        return
    # What the user named, not this machine's copy of it: the adapter will be loaded elsewhere.
    fresh.peft_config["default"].base_model_name_or_path = plan.model.ref
    fresh.peft_config["default"].revision = plan.model.revision
    fresh.save_pretrained(str(folder))


def _mean(summed: tuple[float, int]) -> float:
    total, tokens = summed
    return total / max(tokens, 1)
