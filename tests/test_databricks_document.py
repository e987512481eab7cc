# SPDX-License-Identifier: Apache-2.0
"""What docs/databricks.md tells readers to copy is understood, and its tables name what there is."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from deepspeed_provider.backends.jobs_body import JobSettings, job_settings
from deepspeed_provider.operators.own_training import OwnTrainingOperator
from deepspeed_provider.training import own_code
from test_imports import ROOT

DOCUMENT = (ROOT / "docs" / "databricks.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: re.search(r'DAG\("(\w+)"', text)[1])
def test_an_example_is_a_dag_that_can_be_sent(example: str) -> None:
    found: dict[str, Any] = {"__name__": "example"}
    # Operators refuse parameters that they do not have.
    exec(compile(example, "docs/databricks.md", "exec"), found)
    (task,) = found["dag"].tasks
    settings = job_settings({"code_folder": f"{task.base_uri}/code", **(task.job or {})})
    assert settings.code_folder.startswith("/Volumes/")
    if isinstance(task, OwnTrainingOperator):
        request = task.build_request("token", f"{task.base_uri}/out", None)
        assert request.entry.startswith(own_code.__name__)


def rows(header: str) -> set[str]:
    """First cells of the table under this header."""
    table = DOCUMENT.partition(f"| {header} |")[2].partition("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))


def test_the_tables_name_what_there_is() -> None:
    assert rows("field") == {each.name for each in fields(JobSettings)}
    assert rows("`config_flags`") == set(own_code.CONFIG_FLAGS)


@pytest.mark.parametrize("variable", [own_code.RESULT_VARIABLE, own_code.CONFIG_VARIABLE])
def test_the_variables_of_a_script_are_told(variable: str) -> None:
    assert f"`{variable}`" in DOCUMENT
