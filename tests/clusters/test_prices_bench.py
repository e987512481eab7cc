# SPDX-License-Identifier: Apache-2.0
"""The bench's prices of naive choices: that there are some, and that they are what their names say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from deepspeed_provider.clusters.node_types import Cloud, node_types
from deepspeed_provider.sizing.options import Offload

sys.path.insert(0, str(Path(__file__).parents[2]))

from benches import search

AWS = [kind for kind in node_types() if kind.cloud is Cloud.AWS]


def test_thirty_jobs_are_priced():
    found = search.comparisons()
    assert [one.published for one in found] == [True] * 10 + [False] * 20
    assert all(one.ours > 0 for one in found)
    assert all(one.advice and one.advice_by_model for one in found if one.published)
    # The naive choices lie inside our search where both are priced by the model.
    modelled = [(one.ours, price) for one in found if not one.published for price in (one.advice, one.cheapest)]
    assert sum(price is not None for _, price in modelled) >= 30
    assert all(price >= ours for ours, price in modelled if price is not None)


@pytest.mark.parametrize(
    ("model", "offload"),
    [
        pytest.param("meta-llama/Llama-3.1-8B", Offload.NONE, id="it fits"),
        pytest.param("codellama/CodeLlama-34b-hf", Offload.OPTIMIZER, id="it fits with offload"),
    ],
)
def test_the_advice_is_taken_as_it_is_given(model: str, offload: Offload):
    advised = search.advice(search.job(model, "full", 32, 2048), AWS)
    assert advised is not None
    options = advised.options
    assert (advised.node_type.node_type_id, advised.nodes) == ("p4d.24xlarge", 1)
    assert (options.zero_stage, options.precision, options.gradient_checkpointing) == (3, "bf16", True)
    assert options.offload is offload


def test_the_cheapest_hour_is_the_first_that_fits():
    sought = search.job("meta-llama/Llama-3.1-8B", "full", 32, 2048)
    found = search.cheapest_per_hour(sought, AWS)
    assert found is not None
    for kind in AWS:
        if kind.launchable and kind.priced() and kind.usd_per_hour() < found.usd_per_hour:
            alone = search.search(sought, [kind], search.Constraints(max_nodes=1), top=1).best
            assert alone is None or alone.usd_per_hour >= found.usd_per_hour
