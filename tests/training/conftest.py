# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from training import tiny_runs


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    return tiny_runs.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    return tiny_runs.make_tokenizer(tmp_path_factory.mktemp("plain"), chat_template=None)


@pytest.fixture(scope="session")
def spark(engine: object) -> object:
    """A Spark Connect session on the engine that all rooms share."""
    from pyspark.sql.connect.session import SparkSession

    session = SparkSession.builder.remote(engine.url).create()
    yield session
    session.stop()
