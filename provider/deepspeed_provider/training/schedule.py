# SPDX-License-Identifier: Apache-2.0
"""Learning rate as a share of its peak."""

from __future__ import annotations

import math


def learning_rate_factor(step: int, *, total_steps: int, warmup_ratio: float, schedule: str) -> float:
    """Share of the peak learning rate that optimizer step ``step`` (from 0) takes, in (0, 1].

    Linear warm-up over the first ``warmup_ratio`` of the steps, reaching 1 at its end, then ``cosine`` or
    ``linear`` decay that would reach 0 just after the last step, or ``constant``.
    """
    warmup_steps = math.ceil(total_steps * warmup_ratio)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0 - done if schedule == "linear" else 1.0
