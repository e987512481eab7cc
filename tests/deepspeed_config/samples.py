# SPDX-License-Identifier: Apache-2.0
"""Seeded random settings, and random mistakes in the configurations made from them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from deepspeed_provider.deepspeed_config.findings import Facts
from deepspeed_provider.deepspeed_config.generate import BatchTriple, EngineSettings
from deepspeed_provider.sizing.options import Offload, OffloadDevice

MISTAKES = (
    "true",
    "2",
    "auto",
    "fast",
    -1,
    0,
    0.5,
    1e9,
    7,
    True,
    False,
    None,
    [],
    {},
    {"enabled": True},
    3,
    "cpu",
    10**9,
)
KEYS = (
    "stage",
    "enabled",
    "device",
    "loss_scale",
    "cpu_offload",
    "max_live_parameters",
    "amp",
    "ratio",
    "offload_param",
)
KEYS += ("train_batch_size", "wall_clock_breakdown", "mics_shard_size", "compute_grad_norm", "gradient_allreduce_op")
KEYS += ("bfloat16", "communication_data_type", "data_types", "checkpoint", "bf16_optimizer_states", "tag_validation")


def settings(seed: int, count: int) -> Iterator[EngineSettings]:
    """Plans of all kinds: from one CPU rank to hundreds of GPUs, from an adapter to 70 B parameters."""
    random_ = random.Random(seed)
    for _ in range(count):
        stage = random_.choice((0, 1, 2, 3, 3))
        offload = random_.choice([Offload.NONE, *_offloads(stage)])
        known = random_.random() < 0.8
        parameters = round(10 ** random_.uniform(5, 11))
        yield EngineSettings(
            batch=BatchTriple(
                micro_batch_size=random_.choice((1, 2, 3, 4, 8, 16, 64)),
                gradient_accumulation_steps=random_.choice((1, 2, 3, 5, 8, 16, 128)),
                world_size=random_.choice((1, 2, 3, 4, 6, 8, 16, 24, 64, 512)),
            ),
            zero_stage=stage,
            precision=random_.choice(("fp32", "bf16", "fp16")),
            gradient_clipping=random_.choice((0.0, 0.3, 1.0, 5.0)),
            use_gpu=random_.random() < 0.8,
            offload=offload,
            offload_device=random_.choice([OffloadDevice.CPU, *([OffloadDevice.NVME] if stage == 3 else [])]),
            hidden_size=random_.choice((64, 576, 1024, 4096, 8192, 16384)) if known else None,
            parameters=parameters if known else None,
            trained_parameters=random_.choice((parameters, max(1, parameters // 200))) if known else None,
            largest_parameter=parameters // 4 if known else None,
        )


def _offloads(stage: int) -> list[Offload]:
    return {0: [], 3: list(Offload)}.get(stage, [Offload.OPTIMIZER])


def facts(chosen: EngineSettings) -> Facts:
    """As a plan knows them."""
    return Facts(
        world_size=chosen.batch.world_size,
        trained_parameters=chosen.trained_parameters,
        use_gpu=chosen.use_gpu if chosen.precision != "fp16" else True,
        bf16=True,
        has_disk=True,
        has_libaio=True,
    )


def mistaken(config: dict[str, Any], seed: int) -> dict[str, Any]:
    """The configuration with one or two values or keys changed, added or taken away, at any level."""
    random_ = random.Random(seed)
    changed = copy.deepcopy(config)
    for _ in range(random_.choice((1, 1, 2))):
        node = random_.choice(list(_sections(changed)))
        what = random_.random()
        if what < 0.2 and node:
            del node[random_.choice(sorted(node))]
        elif what < 0.6 and node:
            node[random_.choice(sorted(node))] = copy.deepcopy(random_.choice(MISTAKES))
        else:
            node[random_.choice(KEYS)] = copy.deepcopy(random_.choice(MISTAKES))
    return changed


def _sections(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for value in node.values():
        if isinstance(value, dict):
            yield from _sections(value)
