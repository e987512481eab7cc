# SPDX-License-Identifier: Apache-2.0
"""What docs/testing.md tells readers to copy passes where it is copied to, and its tables name what there is."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from deepspeed_provider.testing import endings, faults, pytest_plugin, run_scripts
from test_imports import ROOT

DOCUMENT = (ROOT / "docs" / "testing.md").read_text()
FILE = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_what_is_copied_passes(tmp_path: Path) -> None:
    """In a process of its own, as the document makes an Airflow of its own."""
    files = FILE.findall(DOCUMENT)
    assert len(files) == DOCUMENT.count("```python")
    for name, text in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", pytest_plugin.__name__, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    tests = sum(len(re.findall(r"^def test_", text, re.MULTILINE)) for _, text in files)
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= tests


@pytest.mark.parametrize(
    "module", [endings, faults, run_scripts], ids=lambda module: module.__name__.rpartition(".")[2]
)
def test_the_table_has_every_way_that_there_is(module: ModuleType) -> None:
    ways = {
        name
        for name, made in inspect.getmembers(module, inspect.isfunction)
        if made.__module__ == module.__name__
        and not name.startswith("_")
        and made.__annotations__.get("return") in ("Ending", "Fault", "Script")
    } - {"of_tasks"}
    told = {
        name for row in re.findall(r"^\| (.*?) \|", DOCUMENT, re.MULTILINE) for name in re.findall(r"`(\w+)\(", row)
    }
    assert ways
    assert ways <= told
