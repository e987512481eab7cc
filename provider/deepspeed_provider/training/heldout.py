# SPDX-License-Identifier: Apache-2.0
"""Loss on held-out rows, weighted by token and summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .data import IGNORED_LABEL, Example, collate
from .ranks import sum_over_ranks


def summed_loss(logits: Any, labels: Any) -> tuple[float, int]:
    """Cross entropy summed over the tokens that have a label, and their number.

    Args:
        logits: (rows, length, vocabulary), any float type.
        labels: (rows, length); position t is predicted from what stands before it.
    """
    import torch.nn.functional as F

    total, tokens = 0.0, 0
    # Row by row: the float32 copy of all logits would be the largest tensor of the evaluation.
    for row_logits, row_labels in zip(logits, labels, strict=True):
        count = int((row_labels[1:] != IGNORED_LABEL).sum())
        if count:
            loss = F.cross_entropy(row_logits[:-1].float(), row_labels[1:], ignore_index=IGNORED_LABEL, reduction="sum")
            total, tokens = total + float(loss), tokens + count
    return total, tokens


def local_loss(
    model: Any, batches: Sequence[Sequence[Example]], *, pad_token_id: int, device: str
) -> tuple[float, int]:
    """Summed loss and token count of this rank's batches; ``model`` may be a DeepSpeed engine."""
    import torch

    total, tokens = 0.0, 0
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for examples in batches:
            batch = collate(examples, pad_token_id, device)
            labels = batch.pop("labels")
            loss, count = summed_loss(model(**batch, use_cache=False).logits, labels)
            total, tokens = total + loss, tokens + count
    model.train(was_training)
    return total, tokens


def mean_loss(model: Any, batches: Sequence[Sequence[Example]], *, pad_token_id: int, device: str) -> float:
    """Mean loss per token over the batches of all ranks; every rank must call it with as many batches."""
    total, tokens = local_loss(model, batches, pad_token_id=pad_token_id, device=device)
    total, count = sum_over_ranks(total, tokens, device=device)
    return total / count


def perplexity(loss: float) -> float:
    """exp(loss); infinite where a double cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf
