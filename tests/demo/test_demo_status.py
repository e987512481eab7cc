# SPDX-License-Identifier: Apache-2.0
"""What ``demo --once`` tells by its exit status: whether the tuned model was better and registered."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from deepspeed_provider.cli import app
from deepspeed_provider.local import demo
from deepspeed_provider.local.demo import DemoOutcome
from typer.testing import CliRunner

GOOD = DemoOutcome(
    state="success", base_perplexity=30.0, tuned_perplexity=9.0, registered={"name": "docs", "version": "1"}
)
NOT_GOOD = {
    "no better": {"tuned_perplexity": 30.0},
    "worse": {"tuned_perplexity": 31.0},
    "no number": {"tuned_perplexity": float("nan")},
    "not registered": {"registered": {}},
    "registered without a version": {"registered": {"name": "docs", "version": None}},
    "failed afterwards": {"state": "failed"},
    "failed before the evaluation": {
        **{"state": "failed", "base_perplexity": None, "tuned_perplexity": None, "registered": {}}
    },
    "interrupted": {**{"state": "interrupted", "base_perplexity": None, "tuned_perplexity": None, "registered": {}}},
}


def ended(changes: dict[str, Any]) -> DemoOutcome:
    return dataclasses.replace(GOOD, **changes)


def test_better_and_registered_is_good() -> None:
    assert GOOD.good


@pytest.mark.parametrize("changes", NOT_GOOD.values(), ids=NOT_GOOD)
def test_anything_less_is_not_good(changes: dict[str, Any]) -> None:
    assert not ended(changes).good


@pytest.mark.parametrize(
    ("words", "changes", "status"),
    [
        pytest.param(["--once"], {}, 0, id="good"),
        *(pytest.param(["--once"], changes, 1, id=name) for name, changes in NOT_GOOD.items()),
        pytest.param([], NOT_GOOD["interrupted"], 0, id="without --once, ended by a person"),
    ],
)
def test_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, words: list[str], changes: dict[str, Any], status: int
) -> None:
    asked = []

    def run_demo(*_: Any, once: bool) -> DemoOutcome:
        asked.append(once)
        return ended(changes)

    monkeypatch.setattr(demo, "run_demo", run_demo)
    result = CliRunner().invoke(app, ["demo", *words])
    assert result.exit_code == status, result.output
    assert asked == [bool(words)]
