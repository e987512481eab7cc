# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider`` as its tests call it: whatever goes wrong is told, never a traceback."""

from __future__ import annotations

import json
from typing import Any

from deepspeed_provider.cli import app
from typer.testing import CliRunner, Result

# What no command that only computes may load.
HEAVY = {"airflow", "torch", "transformers", "deepspeed", "peft", "mlflow", "pyspark", "pandas", "pyarrow"}


def run(command: str, *words: str, columns: int = 140, stdin: str | bytes | None = None) -> Result:
    result = CliRunner().invoke(app, [command, *words], input=stdin, env={"COLUMNS": str(columns)})
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def as_json(command: str, *words: str, exit_code: int = 0) -> dict[str, Any]:
    result = run(command, *words, "--json")
    assert result.exit_code == exit_code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found
