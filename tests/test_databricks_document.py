# SPDX-License-Identifier: Apache-2.0
"""What docs/databricks.md tells readers to copy is understood, and its tables name what there is."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import fields
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred
from deepspeed_provider.backends.jobs_body import JobSettings
from deepspeed_provider.testing.workspace import FakeWorkspace
from deepspeed_provider.training import own_code
from operators.fake_task import FakeTask
from test_imports import ROOT

DOCUMENT = (ROOT / "docs" / "databricks.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: re.search(r'DAG\("(\w+)"', text)[1])
def test_an_example_is_a_dag_whose_run_the_workspace_takes(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"__name__": "example"}
    # Operators refuse parameters that they do not have.
    exec(compile(example, "docs/databricks.md", "exec"), found)
    (task,) = found["dag"].tasks
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with FakeWorkspace(poll_s=3600) as workspace:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", workspace.connection_json)
        workspace.clusters.add("0101-120000-abcdefgh")
        task.poll_interval = 0.01
        with suppress(TaskDeferred):
            task.execute(FakeTask(try_number=1).context())
        (run,) = workspace.runs
    assert run.token


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
