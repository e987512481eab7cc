# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
from pathlib import Path

import pytest
from deepspeed_provider import training

# Of the runtimes 13.3 and 14.3; later ones have 3.11 and 3.12.
OLDEST = (3, 10)
MODULES = sorted(Path(training.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=[module.stem for module in MODULES])
def test_what_travels_can_be_read_by_the_oldest_python_of_a_runtime(module: Path) -> None:
    ast.parse(module.read_text(encoding="utf-8"), feature_version=OLDEST)
