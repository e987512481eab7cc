# SPDX-License-Identifier: Apache-2.0
"""The two kinds of Spark session, a client of Spark Connect and a driver's own, where they differ.

The driver's own may be of Spark 3.5, as in Databricks' runtimes; a client is of 4.2 or later.
"""

from __future__ import annotations

import importlib
from typing import Any


def is_client(value: Any) -> bool:
    """Whether a session or a frame is one of Spark Connect's, rather than the driver's own."""
    return type(value).__module__.startswith("pyspark.sql.connect.")


def functions_for(value: Any) -> Any:
    """The module of functions whose columns go with a session or a frame; each kind has a class of columns."""
    return importlib.import_module("pyspark.sql.connect.functions" if is_client(value) else "pyspark.sql.functions")


def spark_errors() -> tuple[type[Exception], ...]:
    """What Spark raises. In a driver's own session those of its errors that Python has no class for come as Java's."""
    from pyspark.errors import PySparkException

    try:
        from py4j.protocol import Py4JJavaError
    except ImportError:  # a client without a JVM
        return (PySparkException,)
    return (PySparkException, Py4JJavaError)


def conditions(error: Exception) -> tuple[str, ...]:
    """Spark's names of what went wrong, such as ``PATH_NOT_FOUND``, the outermost first."""
    return tuple(filter(None, map(_condition, _causes(error))))


def first_line(error: Exception) -> str:
    """What Spark says of an error, in one line: of Java's causes the innermost that it has a name for."""
    causes = _causes(error)
    told = next((cause for cause in reversed(causes) if _condition(cause)), causes[0])
    text = str(told) if told is error else str(told.getMessage())
    return text.strip().partition("\n")[0]


def _causes(error: Exception) -> list[Any]:
    """The error alone, or what it is in Java and why."""
    java = getattr(error, "java_exception", None)
    if java is None:
        return [error]
    found = []
    while java is not None:
        found.append(java)
        java = java.getCause()
    return found


def _condition(error: Any) -> str:
    """``getCondition`` came with Spark 4.0; an error of neither name is no error of Spark's own."""
    for name in ("getCondition", "getErrorClass"):
        try:
            return str(getattr(error, name)() or "")
        except Exception:  # noqa: BLE001  (the bridge to Java has errors of its own for what is not there)
            continue
    return ""
