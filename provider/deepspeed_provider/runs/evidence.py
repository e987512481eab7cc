# SPDX-License-Identifier: Apache-2.0
"""Reads what the ranks wrote: progress, results and failures. Pure; the texts come from the backend."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_provider.backends import rank_failures
from deepspeed_provider.errors import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands, as rank 0 last wrote it."""

    phase: str
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    eval_loss: float | None = None

    def __str__(self) -> str:
        parts = [self.phase]
        if self.step or self.total_steps:
            parts.append(f"step {self.step}/{self.total_steps}" if self.total_steps else f"step {self.step}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.eval_loss is not None:
            parts.append(f"held-out loss {self.eval_loss:.4f}")
        if self.learning_rate is not None:
            parts.append(f"learning rate {self.learning_rate:.3g}")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.0f} tokens/s")
        if self.peak_memory_bytes:
            parts.append(f"peak memory {self.peak_memory_bytes / 2**30:.2f} GiB")
        return ", ".join(parts)


def read_progress(texts: Iterable[str]) -> Progress | None:
    """The progress in the first text that holds one. A half-written file is no news."""
    for text in texts:
        record = _json_object(text)
        if isinstance(record.get("phase"), str):
            return Progress(
                **{name: record[name] for name in Progress.__dataclass_fields__ if record.get(name) is not None}
            )
    return None


def read_result(texts: Iterable[str], token: str) -> dict[str, Any] | None:
    """The result of the run with this token, or None."""
    for text in texts:
        record = _json_object(text)
        if record.get("token") == token:
            return record
    return None


def cause(files: Mapping[str, str]) -> Failure | None:
    """The cause among the ranks' failure files. A half-written file is no news."""
    return rank_failures.cause(_json_object(text) for text in files.values())


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
