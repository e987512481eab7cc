# SPDX-License-Identifier: Apache-2.0
"""Calling functions of this package in the Python workers of a Spark Connect session's cluster."""

from __future__ import annotations

import hashlib
import json
import pkgutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas
    from pyspark.sql import SparkSession

_PACKAGE = __name__.rpartition(".")[0]


def ship_code(spark: SparkSession) -> None:
    """Adds this package to the session: the workers may have neither the provider nor a checkout."""
    top = _PACKAGE.partition(".")[0]
    code = source_files()
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch, f"deepspeed-provider-training-{digest_of_code(code)}.zip")
        with zipfile.ZipFile(archive, "w") as writer:
            # Equal code must give equal bytes: a session refuses another file under a name that it knows.
            writer.writestr(zipfile.ZipInfo(f"{top}/__init__.py"), "")
            for name, content in code.items():
                writer.writestr(zipfile.ZipInfo(f"{_PACKAGE.replace('.', '/')}/{name}"), content)
        spark.addArtifacts(str(archive), pyfile=True)


def call(spark: SparkSession, function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function`` of a shipped module returns (JSON-able) when one Python worker calls it."""

    def answer(batches: Iterator[pandas.DataFrame]) -> Iterator[pandas.DataFrame]:
        import pandas

        for _ in batches:
            yield pandas.DataFrame({"answer": [json.dumps(function(*arguments))]})

    return json.loads(spark.range(0, 1, 1, 1).mapInPandas(answer, "answer string").collect()[0]["answer"])


def source_files() -> dict[str, bytes]:
    """Source of each module of this package, by file name; read through the loader, as it may be a zip."""
    import deepspeed_provider.training as package

    names = ["__init__.py", *sorted(f"{module.name}.py" for module in pkgutil.iter_modules(package.__path__))]
    return {name: pkgutil.get_data(_PACKAGE, name) or b"" for name in names}


def digest_of_code(code: Mapping[str, bytes]) -> str:
    """16 hexadecimal digits that change with any name or byte."""
    whole = hashlib.sha256()
    for name in sorted(code):
        whole.update(f"{name}\0{len(code[name])}\0".encode() + code[name])
    return whole.hexdigest()[:16]
