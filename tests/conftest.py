"""Fixtures that several rooms share: one embedded engine for the whole session."""

from __future__ import annotations

import pytest
from deepspeed_provider.local.engine import EmbeddedEngine, EngineSettings


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """A real Spark Connect server, started once; four ranks fit side by side."""
    home = tmp_path_factory.mktemp("engine")
    with EmbeddedEngine(home, EngineSettings(ranks=4, ui_port=None)) as started:
        yield started
