# SPDX-License-Identifier: Apache-2.0
"""Settings for hardware that is there already."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from deepspeed_provider.clusters.candidate import Room, need
from deepspeed_provider.clusters.given import Fitted, fit
from deepspeed_provider.clusters.gpus import GIB, gpu
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Constraints, Headroom, Objective
from deepspeed_provider.clusters.needs import Shortage
from deepspeed_provider.clusters.refusals import FLASH_COMPUTE_CAPABILITY
from deepspeed_provider.clusters.search import search
from deepspeed_provider.clusters.throughput import slowed
from deepspeed_provider.errors import SpecError
from deepspeed_provider.sizing.options import Attention

from clusters.brute_force import random_catalogue, random_job
from clusters.test_search import _job


@pytest.mark.parametrize("seed", range(10))
def test_agrees_with_the_search_for_such_machines(seed: int) -> None:
    chance = random.Random(seed)
    job, nodes = random_job(chance), chance.choice((1, 2))
    for kind in random_catalogue(chance):
        if not kind.launchable or not kind.priced() or job.effective_batch_size % (kind.gpus * nodes):
            continue
        # Whether its kernels run there is asked before settings are.
        if job.options.attention is Attention.FLASH and kind.gpu.compute_capability < FLASH_COMPUTE_CAPABILITY:
            continue
        limits = Constraints(min_nodes=nodes, max_nodes=nodes)
        sought, found = search(job, [kind], limits, Objective.TIME), fit(job, Hardware.of(kind, nodes))
        if sought.best is None:
            assert isinstance(found, Shortage)
            assert str(found) == sought.rejections[0].reason
        else:
            assert isinstance(found, Fitted)
            assert (found.layout, found.options) == (sought.best.layout, sought.best.options)
            assert slowed(found.throughput, sought.best.slowdown) == sought.best.throughput


def test_a_described_server_gets_settings_time_and_price() -> None:
    server = Hardware.given(gpu=gpu("A10G"), gpus_per_node=4, ram_bytes_per_node=192 * GIB)
    found = fit(_job(), server, usd_per_hour=5.0)
    assert isinstance(found, Fitted)
    assert found.options.world_size == 4
    assert found.hours == pytest.approx(found.steps * found.throughput.seconds_per_step / 3600)
    assert found.usd == pytest.approx(5.0 * found.hours)
    assert not need(_job(), found.options).shortfalls(Room.of(server, Headroom()))
    unpriced = fit(_job(), server)
    assert isinstance(unpriced, Fitted)
    assert unpriced.usd is None


def test_a_server_that_is_too_small_says_by_how_much() -> None:
    server = Hardware.given(gpu=gpu("T4"), gpus_per_node=1, ram_bytes_per_node=64 * GIB)
    found = fit(_job(method="full"), server)
    assert isinstance(found, Shortage)
    room = Room.of(server, Headroom())
    assert found.missing_bytes > 0
    assert room.gpu_bytes < server.gpu.memory_bytes
    assert "GiB of" in str(found)


def test_less_room_is_left_to_a_plan_that_must_leave_more() -> None:
    server = Hardware.given(gpu=gpu("A10G"), gpus_per_node=1, ram_bytes_per_node=64 * GIB)
    tight = fit(_job(), server, headroom=Headroom(gpu=0.9))
    assert isinstance(tight, Shortage)
    assert tight.resource == "GPU memory"


def test_a_batch_that_does_not_divide_names_those_that_do() -> None:
    server = Hardware.given(gpu=gpu("A10G"), gpus_per_node=6)
    with pytest.raises(SpecError, match="does not divide over 6 GPUs") as caught:
        fit(replace(_job(), effective_batch_size=32), server)
    assert "Use 30 or 36" in str(caught.value)
