# SPDX-License-Identifier: Apache-2.0
"""Every generated configuration is complete, and DeepSpeed itself takes it for its world size."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from itertools import product
from typing import Any

import pytest
from deepspeed_provider.deepspeed_config.generate import BatchTriple, deepspeed_config
from hypothesis import given
from hypothesis import strategies as st

CONFIGS = [
    (
        world_size,
        deepspeed_config(
            batch=BatchTriple(micro_batch_size=3, gradient_accumulation_steps=4, world_size=world_size),
            zero_stage=stage,
            precision=precision,
            gradient_clipping=1.0,
            use_gpu=use_gpu,
        ),
    )
    for world_size, stage, precision, use_gpu in product((1, 2, 7), range(4), ("fp32", "bf16", "fp16"), (True, False))
]

# DeepSpeed asks an mpu for the world size, once torch.distributed runs; else it assumes 1 and refuses
# valid batch sizes.
READ_ALL = textwrap.dedent(
    """
    import json, sys
    import torch.distributed
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    import deepspeed
    # Its CPU operator would be compiled for a minute, and is not used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    from deepspeed.runtime.config import DeepSpeedConfig

    class Mpu:
        def __init__(self, size): self.size = size
        def get_data_parallel_world_size(self): return self.size
        def get_model_parallel_world_size(self): return 1

    found = []
    for world_size, config in json.load(sys.stdin):
        read = DeepSpeedConfig(config, mpu=Mpu(world_size))
        zero = read.zero_config
        found.append([
            read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps,
            zero.stage, read.gradient_clipping, read.zero_allow_untested_optimizer,
            bool(read.bfloat16_config.enabled), bool(read.float16_config.enabled),
            zero.gather_16bit_weights_on_model_save, zero.reduce_bucket_size,
        ])
    print("FOUND" + json.dumps(found))
    """
)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [value]


@given(
    st.builds(
        BatchTriple,
        micro_batch_size=st.integers(1, 512),
        gradient_accumulation_steps=st.integers(1, 512),
        world_size=st.integers(1, 512),
    ),
    st.integers(0, 3),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.booleans(),
)
def test_nothing_is_left_to_guess(batch: BatchTriple, stage: int, precision: str, use_gpu: bool) -> None:
    config = deepspeed_config(
        batch=batch, zero_stage=stage, precision=precision, gradient_clipping=1.0, use_gpu=use_gpu
    )
    assert all(isinstance(leaf, (int, float)) for leaf in leaves(config))  # no "auto", no text at all
    micro, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == micro * steps * batch.world_size
    assert not (config["bf16"]["enabled"] and config["fp16"]["enabled"])
    json.dumps(config)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_deepspeed_takes_each_and_means_the_same() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", READ_ALL],
        input=json.dumps(CONFIGS),
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=170,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout.rpartition("FOUND")[2])
    assert len(found) == len(CONFIGS)
    for (world_size, config), (batch, micro, steps, stage, clip, untested, bf16, fp16, gather, bucket) in zip(
        CONFIGS, found, strict=True
    ):
        zero = config["zero_optimization"]
        assert (batch, micro, steps) == (12 * world_size, 3, 4)
        assert (stage, clip, untested) == (zero["stage"], 1.0, True)
        assert (bf16, fp16) == (config["bf16"]["enabled"], config["fp16"]["enabled"])
        assert gather == (stage == 3)
        assert stage == 0 or bucket == zero["reduce_bucket_size"]
