# SPDX-License-Identifier: Apache-2.0
"""The preparation in a driver's own Spark session: the same tests once more, in a process that has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed_provider.local.jvm import classic_java_home, find_jvm

from training.conftest import CLASSIC

ROOMS = Path(__file__).parents[1]
SAME = ("test_prepare_cleaning.py", "test_prepare_sources.py", "test_prepare.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_drivers_own_session_does_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(str(Path(__file__).with_name(name)) for name in SAME),
        ],
        cwd=ROOMS.parent,
        env={
            **os.environ,
            CLASSIC: "1",
            "JAVA_HOME": str(classic_java_home(find_jvm(), tmp_path)),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
