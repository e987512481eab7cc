"""Fixtures that several rooms share: one embedded engine for the whole session."""

from __future__ import annotations

import os

import pytest
from bare_environment import make_bare_environment
from deepspeed_provider.local.engine import EmbeddedEngine, EngineSettings
from hypothesis import HealthCheck, settings

# What users' tests load by its entry point, which an installation from before it was there lacks.
pytest_plugins = ["deepspeed_provider.testing.pytest_plugin"]

# How long an example takes on a shared machine says nothing.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

# The engines of tests live for minutes: compiling their code for speed costs more time than it saves.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """A real Spark Connect server, started once; four ranks fit side by side."""
    home = tmp_path_factory.mktemp("engine")
    with EmbeddedEngine(home, EngineSettings(ranks=4, ui_port=None)) as started:
        yield started


@pytest.fixture(scope="session")
def bare_engine(tmp_path_factory):
    """A server whose Python has neither our package, nor Airflow, nor the checkout on its path."""
    python = make_bare_environment(tmp_path_factory.mktemp("bare") / "venv")
    home = tmp_path_factory.mktemp("cluster")
    with EmbeddedEngine(home, EngineSettings(ranks=2, ui_port=None, python=str(python))) as started:
        yield started
