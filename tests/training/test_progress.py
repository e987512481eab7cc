# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from deepspeed_provider.training.progress import Reporter


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]


def test_written_by_rhythm_phase_and_last_step(tmp_path: Path) -> None:
    clock = Clock()
    reporter = Reporter(str(tmp_path), clock=clock, peak_memory=lambda: 77)
    reporter.update(phase="loading")
    reporter.update(phase="training", total_steps=10)
    for step in range(1, 11):
        clock.now += 0.25
        reporter.update(step=step, loss=1.0 / step)
    assert [(entry["phase"], entry["step"]) for entry in lines(tmp_path)] == [
        ("loading", 0),
        ("training", 0),
        ("training", 4),
        ("training", 8),
        ("training", 10),
    ]
    latest = json.loads((tmp_path / "progress.json").read_text())
    assert latest == lines(tmp_path)[-1]
    assert (latest["loss"], latest["peak_memory_bytes"], latest["time"]) == (0.1, 77, clock.now)


def test_other_ranks_keep_state_but_write_nothing(tmp_path: Path) -> None:
    reporter = Reporter(None, clock=Clock(), peak_memory=lambda: None)
    reporter.update(phase="training", step=3)
    assert (reporter.now.phase, reporter.now.step) == ("training", 3)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("a file where the folder should be")
    clock = Clock()
    reporter = Reporter(str(blocker / "below"), clock=clock, peak_memory=lambda: None)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            clock.now += 5
            reporter.update(phase="training", step=step)
    assert len(caplog.records) == 1
    assert reporter.now.step == 2


def test_history_where_files_cannot_grow(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    import fsspec

    clock = Clock()
    reporter = Reporter(f"memory://{tmp_path.name}", clock=clock, peak_memory=lambda: None)
    reporter.update(phase="training", total_steps=5)
    for step in range(1, 4):
        clock.now += 2
        reporter.update(step=step)
    reporter.update(phase="saving")
    text = fsspec.filesystem("memory").cat(f"/{tmp_path.name}/progress.jsonl").decode()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [0, 1, 2, 3, 3]
