# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from training import tiny_runs

# Set by test_prepare_on_driver.py, which runs the tests of the preparation once more.
CLASSIC = "TESTS_WITH_A_DRIVERS_OWN_SESSION"


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
def spark(request: pytest.FixtureRequest) -> object:
    """A Spark Connect session on the engine that all rooms share; or, by CLASSIC, a driver's own."""
    if CLASSIC in os.environ:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False)
        session = builder.config("spark.sql.shuffle.partitions", 4).getOrCreate()
    else:
        from pyspark.sql.connect.session import SparkSession

        session = SparkSession.builder.remote(request.getfixturevalue("engine").url).create()
    yield session
    session.stop()
