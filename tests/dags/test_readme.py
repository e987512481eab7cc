# SPDX-License-Identifier: Apache-2.0
"""The README's example DAGs are what a reader copies first: each parses, builds and loads nothing heavy."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.serialization.serialized_objects import DagSerialization
from deepspeed_provider.spec import FineTuneSpec
from test_imports import HEAVY, loaded_by

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
EXAMPLES = [block for _, text in BLOCK.findall(README.read_text()) if "@dag" in (block := textwrap.dedent(text))]


@pytest.fixture(params=EXAMPLES, ids=lambda block: re.search(r"def (\w+)", block)[1])
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "example.py"
    path.write_text(request.param)
    return path


def test_every_block_of_a_dag_is_found() -> None:
    assert EXAMPLES
    assert len(EXAMPLES) == README.read_text().count("@dag")


def test_an_example_builds_and_its_specs_are_valid(example: Path) -> None:
    dagbag = DagBag(str(example))
    assert dagbag.import_errors == {}
    assert dagbag.dags
    for dag in dagbag.dags.values():
        assert dag.tasks
        for task in dag.tasks:
            if isinstance(spec := getattr(task, "spec", None), dict):
                FineTuneSpec.from_params(spec)
        DagSerialization.deserialize_dag(DagSerialization.serialize_dag(dag))


def test_an_example_loads_nothing_heavy(example: Path, tmp_path: Path) -> None:
    assert not loaded_by([str(example)], tmp_path) & set(HEAVY)
