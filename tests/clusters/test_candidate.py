# SPDX-License-Identifier: Apache-2.0
"""What a cluster costs an hour."""

from __future__ import annotations

import pytest
from deepspeed_provider.clusters.candidate import candidate
from deepspeed_provider.clusters.job import Job
from deepspeed_provider.clusters.node_types import node_types
from deepspeed_provider.clusters.settings import layouts
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import Method, TrainingOptions

JOB = Job(
    architecture=architecture(model_config("gpt2")),
    options=TrainingOptions(sequence_length=128),
    tokens=10**6,
    effective_batch_size=64,
)


def priced(node_type, nodes, *, spot):
    layout = layouts(Method.FULL, alone=False, has_nvme=False)[0]
    return candidate(JOB, node_type, nodes, layout, 1, spot=spot).usd_per_hour


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
