# SPDX-License-Identifier: Apache-2.0
"""Time to parse our DAG file against time to import the Databricks provider's operators.

Both in fresh interpreters that have ``airflow.sdk`` loaded already, as a DAG processor has, taken in
turns so that the machine's mood meets both.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

ROUNDS = 9
DAG_FILE = Path(__file__).parents[1] / "dags" / "finetune.py"

CLOCKED = """
import sys, time
import airflow.sdk.definitions.dag, airflow.sdk.bases.operator
started = time.perf_counter()
{body}
print(time.perf_counter() - started)
"""
OURS = f"import runpy; runpy.run_path({str(DAG_FILE)!r})"
THEIRS = "import airflow.providers.databricks.operators.databricks"


def measure() -> None:
    """Prints the medians' ratio."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(_seconds(OURS))
        theirs.append(_seconds(THEIRS))
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(
        f"parsing dags/finetune.py takes {ratio:.2f} times as long as importing the Databricks provider's operators "
        f"(medians of {ROUNDS}: {statistics.median(ours):.3f} s and {statistics.median(theirs):.3f} s)"
    )


def _seconds(body: str) -> float:
    script = CLOCKED.format(body=body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])
