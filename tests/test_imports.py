# SPDX-License-Identifier: Apache-2.0
"""Airflow parses DAG files again and again: none of the heavy packages may come along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import deepspeed_provider
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = Path(deepspeed_provider.__file__).parent
HEAVY = ("torch", "deepspeed", "transformers", "mlflow", "pyspark", "peft", "pandas", "pyarrow", "grpc")
PURE = (
    *("spec", "planning", "handover", "errors", "deepspeed_config.generate", "deepspeed_config.check"),
    *("clusters.gpu_plan", "clusters.cluster_body", "clusters.wire"),
)
AIRFLOW_SIDE = (
    "provider_info",
    "params",
    "assets",
    "links",
    *(
        f"{room}.{path.stem}"
        for room in ("hooks", "operators", "triggers", "runs", "backends", "local")
        for path in sorted((PACKAGE / room).glob("*.py"))
        if path.stem != "__init__"
    ),
)

PROBE = """
import importlib, json, runpy, sys
for target in json.loads(sys.argv[1]):
    runpy.run_path(target) if target.endswith(".py") else importlib.import_module(target)
print("LOADED" + json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded_by(targets: list[str], home: Path) -> set[str]:
    answer = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(targets)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"},
        check=False,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return set(json.loads(answer.stdout.rpartition("LOADED")[2]))


@pytest.mark.parametrize("path", sorted((ROOT / "dags").glob("*.py")), ids=lambda path: path.name)
def test_a_dag_file_loads_nothing_heavy(path: Path, tmp_path: Path) -> None:
    assert not loaded_by([str(path)], tmp_path) & set(HEAVY)


def test_the_airflow_side_loads_nothing_heavy(tmp_path: Path) -> None:
    assert not loaded_by([f"deepspeed_provider.{name}" for name in AIRFLOW_SIDE], tmp_path) & set(HEAVY)


def test_the_pure_core_does_without_airflow(tmp_path: Path) -> None:
    loaded = loaded_by([f"deepspeed_provider.{name}" for name in PURE], tmp_path)
    assert not loaded & {*HEAVY, "airflow", "httpx", "requests"}


def test_the_command_line_loads_neither_airflow_nor_anything_heavy(tmp_path: Path) -> None:
    assert not loaded_by(["deepspeed_provider.cli"], tmp_path) & {*HEAVY, "airflow"}
