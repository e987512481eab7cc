# SPDX-License-Identifier: Apache-2.0
"""A process that lets DeepSpeed's own class read configurations: pairs of world size and configuration on stdin.

Prints, after the word FOUND, one answer each: what DeepSpeed takes, or why it refuses.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


class Mpu:
    """DeepSpeed asks an mpu for the world size, once torch.distributed runs; else it assumes 1 and refuses
    valid batch sizes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_data_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_world_size(self) -> int:
        return 1


def start() -> None:
    import torch.distributed

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    import deepspeed

    # Its CPU operator would be compiled for a minute, and is not used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    logging.disable(logging.CRITICAL)


def read(world_size: int, config: dict[str, Any]) -> dict[str, Any]:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        taken = DeepSpeedConfig(config, mpu=Mpu(world_size))
    except Exception as error:  # noqa: BLE001  (asserts, pydantic's errors, and type errors of half-read values)
        return {"refused": f"{type(error).__name__}: {error}"}
    zero = taken.zero_config
    offload = {name: getattr(zero, name) for name in ("offload_optimizer", "offload_param")}
    return {
        "batch": [taken.train_batch_size, taken.train_micro_batch_size_per_gpu, taken.gradient_accumulation_steps],
        "stage": zero.stage,
        "clip": taken.gradient_clipping,
        "untested": taken.zero_allow_untested_optimizer,
        "bf16": taken.bfloat16_config.enabled,
        "fp16": taken.float16_config.enabled,
        "gather": zero.gather_16bit_weights_on_model_save,
        "bucket": zero.reduce_bucket_size,
        **{name: None if found is None else found.device for name, found in offload.items()},
    }


if __name__ == "__main__":
    start()
    print("FOUND" + json.dumps([read(*pair) for pair in json.load(sys.stdin)]))
