# SPDX-License-Identifier: Apache-2.0
"""A process that starts a DeepSpeed engine of one CPU rank for each configuration on stdin, around a tiny model.

Prints, after the word FOUND, for each why it did not start, or null. A configuration without an optimizer gets
torch's AdamW, as our training passes one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import read_all


def refusal(config: dict[str, Any]) -> str | None:
    import deepspeed
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = None if "optimizer" in config else torch.optim.AdamW(model.parameters())
    try:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config)
    except Exception as error:  # noqa: BLE001  (asserts and errors of all kinds)
        return f"{type(error).__name__}: {error}"
    return None


def _allow_fp16() -> None:
    """Not every CPU computes in it; here nothing is computed, and the configuration alone is judged."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


if __name__ == "__main__":
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    read_all.start()
    _allow_fp16()
    print("FOUND" + json.dumps([refusal(config) for config in json.load(sys.stdin)]))
