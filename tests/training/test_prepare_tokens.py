# SPDX-License-Identifier: Apache-2.0
"""Whose tokenizer counts a data set's tokens: that of the revision which the spec names."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import huggingface_hub
import pytest
from deepspeed_provider.operators.dataset import PrepareDatasetOperator
from deepspeed_provider.training import prepare
from deepspeed_provider.training.prepare import PrepareSettings

from training import tiny_runs

PROMPT, COMPLETION = "What is 7 plus one?", "It is 8."


def settings_of(spec: dict[str, str], base_uri: Path) -> PrepareSettings:
    """What the operator asks for, as the cluster reads it."""
    given = {"model": "someone/model", "data": "docstrings", **spec}
    settings = PrepareDatasetOperator(task_id="prepare", spec=given, base_uri=str(base_uri)).get_settings()
    return PrepareSettings.from_json(json.loads(json.dumps(asdict(settings))))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A hub with two revisions, whose tokenizers count differently; what it was not to send, by request."""
    tiny_runs.make_tokenizer(tmp_path / "None")
    tiny_runs.make_tokenizer(tmp_path / "v2", chat_template=None)
    unwanted = []

    def snapshot_download(_: str, *, revision: str | None, ignore_patterns: list[str]) -> str:
        unwanted.append(ignore_patterns)
        return str(tmp_path / str(revision))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return unwanted


def test_the_revision_of_the_spec_counts_and_its_weights_stay_on_the_hub(hub: list[list[str]], tmp_path: Path) -> None:
    counts = []
    for spec in ({}, {"model_revision": "v2"}):
        tokens_of = prepare._token_counter(settings_of(spec, tmp_path))
        assert tokens_of is not None
        counts.append(tokens_of(PROMPT, COMPLETION))
    assert counts[0] > counts[1] > 0
    assert all("*.safetensors" in patterns for patterns in hub)


def test_each_revision_has_a_data_set_of_its_own(tmp_path: Path) -> None:
    one, other = (asdict(settings_of({"model_revision": revision}, tmp_path)) for revision in ("v1", "v2"))
    assert {name for name in one if one[name] != other[name]} == {"model_revision"}
