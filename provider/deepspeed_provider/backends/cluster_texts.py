# SPDX-License-Identifier: Apache-2.0
"""Small text files that the cluster reads for us: a caller opens no path of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from deepspeed_provider.backends.base import BackendUnavailable


class NoFreeTaskSlot(BackendUnavailable):
    """Reading is a Spark job, and a training may hold every task slot of the cluster for hours."""


def read_texts(spark: Any, uri_pattern: str, *, timeout_seconds: float) -> dict[str, str]:
    """Whole files by name; empty where nothing matches.

    Raises:
        NoFreeTaskSlot: not read within ``timeout_seconds``.
    """
    from pyspark.errors import AnalysisException, PySparkException

    try:
        rows = _read(spark, uri_pattern, timeout_seconds)
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            return {}
        raise
    except PySparkException as error:
        # A file replaced between listing and reading: the next poll reads the new one.
        if "FILE_NOT_EXIST" in str(error) or "FileNotFoundException" in str(error):
            return {}
        raise
    return {row["name"]: row["value"] for row in rows}


def _read(spark: Any, uri_pattern: str, timeout_seconds: float) -> list[Any]:
    def collect() -> list[Any]:
        texts = spark.read.text(uri_pattern, wholetext=True)
        rows: list[Any] = texts.selectExpr("_metadata.file_name AS name", "value").collect()
        return rows

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(collect)
        try:
            return reading.result(timeout_seconds)
        except FutureTimeoutError:
            spark.interruptAll()
            raise NoFreeTaskSlot(
                f"Files of the run could not be read within {timeout_seconds:g} s: the cluster has no free task slot, "
                "so progress is not shown. The run is watched all the same; give the cluster one slot more than ranks."
            ) from None
