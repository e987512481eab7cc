# SPDX-License-Identifier: Apache-2.0
"""The throughput model against published runs: the target, the constants, the page that says so."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest
from deepspeed_provider.clusters.calibration import CALIBRATION

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benches import throughput  # noqa: E402


def test_every_published_row_is_scored():
    assert len(throughput.runs()) == 150
    assert len(throughput.scored()) == 144


@pytest.mark.parametrize("name", throughput.NETWORK_GBPS)
def test_on_a_gpu_that_the_fit_has_not_seen(name):
    errors = throughput.left_out_errors()[name]
    assert statistics.median(map(abs, errors)) <= throughput.TARGET
    assert throughput.percentile_90(errors) <= 20


def test_on_runs_with_deepspeed():
    """LoRA and full fine-tunes of Qwen on one node; its shortest sequences set the host's share."""
    rows = [row for row in throughput.step_times() if row.kind.startswith(("LoRA, ZeRO", "full"))]
    errors = [100 * row.error for row in rows]
    assert len(errors) == 27
    assert statistics.median(map(abs, errors)) <= throughput.TARGET
    assert throughput.percentile_90(errors) <= 25


def test_the_constants_in_use_are_those_of_the_fit():
    fitted = throughput.fitted(throughput.scored())
    for name in throughput.FITTED:
        assert getattr(CALIBRATION, name) == pytest.approx(getattr(fitted, name), rel=0.03)


def test_the_page_is_current():
    assert (ROOT / "docs" / "throughput.md").read_text() == throughput.report()
