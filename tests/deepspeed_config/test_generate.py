# SPDX-License-Identifier: Apache-2.0
"""Every generated configuration is complete and free of findings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepspeed_provider.deepspeed_config.buckets import bucket_sizes
from deepspeed_provider.deepspeed_config.check import check
from deepspeed_provider.deepspeed_config.generate import BatchTriple, EngineSettings, deepspeed_config
from deepspeed_provider.errors import SpecError
from deepspeed_provider.sizing.options import Offload, OffloadDevice

from deepspeed_config import samples

BATCH = BatchTriple(micro_batch_size=2, gradient_accumulation_steps=4, world_size=8)


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings(**{"batch": BATCH, "zero_stage": 2, "precision": "bf16", "gradient_clipping": 1.0, **changes})


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [value]


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_left_to_guess_and_the_checker_finds_nothing(seed: int) -> None:
    for chosen in samples.settings(seed, 500):
        config = deepspeed_config(chosen)
        assert check(config, samples.facts(chosen)) == []
        texts = {leaf for leaf in leaves(config) if not isinstance(leaf, (int, float))}
        assert texts <= {"cpu", "nvme", "none", "/local_disk0/deepspeed"}
        assert config["train_batch_size"] == chosen.batch.effective_batch_size
        assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize("seed", range(10))
def test_no_bucket_is_larger_than_what_it_holds(seed: int) -> None:
    for chosen in samples.settings(seed, 200):
        zero = deepspeed_config(chosen)["zero_optimization"]
        if chosen.trained_parameters is not None and chosen.zero_stage:
            assert 1 <= zero["reduce_bucket_size"] <= chosen.trained_parameters
        if chosen.parameters is not None and chosen.zero_stage == 3:
            assert 1 <= zero["stage3_prefetch_bucket_size"] <= chosen.parameters


def test_buckets_follow_the_hidden_size_within_bounds() -> None:
    sizes = [bucket_sizes(hidden_size=hidden).reduce for hidden in (64, 1024, 4096, 8192, 32768)]
    assert sizes == [1_048_576, 1_048_576, 16_777_216, 67_108_864, 500_000_000]
    assert bucket_sizes(hidden_size=8192, use_gpu=False).reduce < 67_108_864
    assert bucket_sizes(hidden_size=4096).persistence_threshold == 40_960


def test_fp16_scales_the_loss() -> None:
    assert deepspeed_config(settings(precision="fp16"))["fp16"] == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }


def test_offload_to_nvme() -> None:
    config = deepspeed_config(
        settings(zero_stage=3, offload=Offload.ALL, offload_device=OffloadDevice.NVME, largest_parameter=4_000_000_000)
    )
    zero = config["zero_optimization"]
    assert zero["offload_optimizer"]["nvme_path"].startswith("/local_disk0/")
    # Each of the 8 ranks reads its eighth of the largest tensor into one buffer.
    assert zero["offload_param"]["buffer_size"] == 500_000_000
    assert config["zero_force_ds_cpu_optimizer"] is True
    assert config["aio"]["queue_depth"] == 8


REFUSED = {
    "no such stage": ({"zero_stage": 4}, ["zero_stage"]),
    "no such precision": ({"precision": "auto"}, ["precision"]),
    "parameters below stage 3": ({"offload": Offload.PARAMETERS}, ["offload"]),
    "offload without ZeRO": ({"zero_stage": 0, "offload": Offload.OPTIMIZER}, ["offload"]),
    "NVMe below stage 3": ({"offload": Offload.OPTIMIZER, "offload_device": OffloadDevice.NVME}, ["offload_device"]),
    "two at once": ({"offload": Offload.ALL, "offload_device": OffloadDevice.NVME}, ["offload", "offload_device"]),
}


@pytest.mark.parametrize(("changes", "fields"), REFUSED.values(), ids=REFUSED)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        settings(**changes)
    assert [problem.field for problem in caught.value.problems] == fields
