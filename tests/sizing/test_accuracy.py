# SPDX-License-Identifier: Apache-2.0
"""The estimator against published measurements: the targets, what fits, and the page that says so."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from deepspeed_provider.sizing.estimate import Fit, estimate  # noqa: E402
from deepspeed_provider.sizing.overhead import CALIBRATION  # noqa: E402

from benches import accuracy  # noqa: E402
from benches.measurements import known_to_fit, measurements  # noqa: E402


@pytest.fixture(scope="module")
def rows() -> list:
    return [row for row in measurements() if row.tier != "O" and row.measured_bytes]


@pytest.mark.parametrize(("tier", "target"), accuracy.TARGETS.items())
def test_mean_error_of_a_tier(rows, tier, target):
    errors = accuracy.scores(rows)[tier]
    assert statistics.mean(errors) <= target


def test_no_exact_row_is_far_off(rows):
    assert max(accuracy.scores(rows)["A"]) <= 5


def test_every_row_beyond_its_target_is_explained(rows):
    far = [row for row in rows if 100 * abs(row.error) > accuracy.TARGETS.get(row.tier, 12.0)]
    assert far
    for row in far:
        if row.tier != "A":
            assert any(holds(row) for holds, _ in accuracy.MECHANISMS), row.id


def test_the_constants_are_those_that_the_fit_finds(rows):
    facts = accuracy.calibrated(rows)
    sources = {fact.source for fact in facts}

    def loss(calibration):
        per_source = [[fact.error(calibration) for fact in facts if fact.source == source] for source in sources]
        return statistics.mean(statistics.mean(errors) for errors in per_source)

    assert loss(CALIBRATION) <= loss(accuracy.fit(facts)) + 0.05


def test_every_row_is_read_or_said_not_to_be(rows):
    assert accuracy.unscored() == []
    assert len(rows) > 100


def test_what_ran_is_not_declared_too_large():
    for row in measurements():
        if row.out_of_memory is False and row.capacity_bytes:
            assert row.estimate().gpu.fits(int(row.capacity_bytes)) is not Fit.NO, row.id
    for model, options, capacity in known_to_fit():
        assert estimate(model, options).gpu.fits(capacity) is not Fit.NO, options


def test_what_ran_out_of_memory_is_not_declared_to_fit():
    failed = [row for row in measurements() if row.out_of_memory]
    fitting = {row.id for row in failed if row.estimate().gpu.fits(int(row.capacity_bytes)) is Fit.YES}
    assert failed
    assert fitting == set(accuracy.OUT_OF_MEMORY_EXCEPTIONS)


def test_the_page_is_current():
    assert (ROOT / "docs" / "accuracy.md").read_text() == accuracy.report()
