# SPDX-License-Identifier: Apache-2.0
"""What a cluster costs an hour, and how fast it is said to go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deepspeed_provider.clusters.candidate import POOR_NETWORK_FACTOR, candidate
from deepspeed_provider.clusters.job import Job
from deepspeed_provider.clusters.node_types import node_types
from deepspeed_provider.clusters.settings import layouts
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import Method, Optimizer, TrainingOptions

JOB = Job(
    architecture=architecture(model_config("gpt2")),
    options=TrainingOptions(sequence_length=128),
    tokens=10**6,
    effective_batch_size=64,
)


def on(node_type, nodes, *, spot=False):
    layout = layouts(Method.FULL, alone=False, has_nvme=False, optimizer=Optimizer.ADAMW)[0]
    return candidate(JOB, node_type, nodes, layout, 1, spot=spot)


def priced(node_type, nodes, *, spot):
    return on(node_type, nodes, spot=spot).usd_per_hour


def both_prices():
    return next(
        one for one in node_types() if one.launchable and one.priced() and one.priced(spot=True) and one.gpus > 1
    )


def spot_only():
    return next(one for one in node_types() if one.launchable and one.priced(spot=True) and not one.priced())


@pytest.mark.parametrize(("nodes", "billed"), [(1, 1), (2, 3), (4, 5)], ids=["one", "two", "four"])
def test_the_driver_of_several_is_billed(nodes, billed):
    one = both_prices()
    assert priced(one, nodes, spot=False) == pytest.approx(billed * one.usd_per_hour())


def test_a_spot_clusters_driver_stays_on_demand():
    one = both_prices()
    assert priced(one, 2, spot=True) == pytest.approx(2 * one.usd_per_hour(spot=True) + one.usd_per_hour())
    assert priced(one, 1, spot=True) == pytest.approx(one.usd_per_hour(spot=True))


def test_where_only_spot_is_sold_the_driver_is_spot():
    one = spot_only()
    assert priced(one, 2, spot=True) == pytest.approx(3 * one.usd_per_hour(spot=True))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("poor", [True, False])
def test_tokens_in_a_second_agree_with_the_hours(nodes, poor):
    found = on(replace(both_prices(), poor_network=poor), nodes)
    speed, tokens = found.throughput, JOB.steps * JOB.effective_batch_size * JOB.options.sequence_length
    assert tokens / speed.tokens_per_second == pytest.approx(3600 * found.training_hours)
    assert speed.tokens_per_second == pytest.approx(found.hardware.world_size * speed.tokens_per_second_per_gpu)
    assert sum(part.seconds for part in speed.parts) - speed.hidden_seconds == pytest.approx(speed.seconds_per_step)


def test_a_poor_network_slows_several_nodes_only():
    poor, good = (replace(both_prices(), poor_network=poor) for poor in (True, False))
    assert on(poor, 1).throughput == on(good, 1).throughput
    slow, fast = on(poor, 2), on(good, 2)
    assert slow.training_hours == pytest.approx(POOR_NETWORK_FACTOR * fast.training_hours)
    assert fast.throughput.mfu == pytest.approx(POOR_NETWORK_FACTOR * slow.throughput.mfu)
