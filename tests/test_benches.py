# SPDX-License-Identifier: Apache-2.0
"""The benches of parse time and of overhead: that they still fit the code they measure."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from deepspeed_provider.params import finetune_params

sys.path.insert(0, str(Path(__file__).parents[1]))

from benches import overhead, parse_time


def test_our_dag_file_parses_faster_than_the_databricks_operators_import(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parse_time, "ROUNDS", 1)
    parse_time.measure()
    said = capsys.readouterr().out
    ratio = re.search(r"takes ([\d.]+) times as long", said)
    assert ratio is not None, said
    # The bench itself tells how much; one round on a busy machine tells no more than this.
    assert float(ratio[1]) < 1.0, said


def test_the_training_by_hand_is_that_of_the_dag(tmp_path: Path) -> None:
    assert set(overhead.CONF) <= set(finetune_params())
    assert (overhead.DAGS / "finetune.py").exists()
    by_hand = overhead._plan(tmp_path, "file:///data")
    assert (by_hand.world_size, by_hand.use_gpu) == (overhead.RANKS, False)
    assert by_hand.optimization.max_steps == overhead.CONF["max_steps"]
    assert by_hand.tracking is None
