# SPDX-License-Identifier: Apache-2.0
"""Every rule of the checker, in the order in which findings are told."""

from __future__ import annotations

from typing import Final

from deepspeed_provider.deepspeed_config.rules import batch, offload, optimizer, precision, structure, zero
from deepspeed_provider.deepspeed_config.rules.rule import Example, Rule

RULES: Final[tuple[Rule, ...]] = (
    *structure.RULES,
    *batch.RULES,
    *precision.RULES,
    *zero.RULES,
    *offload.RULES,
    *optimizer.RULES,
)

__all__ = ["RULES", "Example", "Rule"]
