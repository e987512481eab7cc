# SPDX-License-Identifier: Apache-2.0
"""Calling functions of this package in the Python workers of a Spark Connect session's cluster."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .code_archive import build_code_archive, training_code

if TYPE_CHECKING:
    import pandas
    from pyspark.sql import SparkSession


def ship_code(spark: SparkSession) -> None:
    """Adds this package to the session: the workers may have neither the provider nor a checkout."""
    with tempfile.TemporaryDirectory() as scratch:
        spark.addArtifacts(str(build_code_archive(training_code(), Path(scratch))), pyfile=True)


def call(spark: SparkSession, function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function`` of a shipped module returns (JSON-able) when one Python worker calls it."""

    def answer(batches: Iterator[pandas.DataFrame]) -> Iterator[pandas.DataFrame]:
        import pandas

        for _ in batches:
            yield pandas.DataFrame({"answer": [json.dumps(function(*arguments))]})

    return json.loads(spark.range(0, 1, 1, 1).mapInPandas(answer, "answer string").collect()[0]["answer"])
