# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def deepspeed_reads(configs: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What DeepSpeed's own class makes of each, for its world size; in a process of its own."""
    answer = script("read_all.py", json.dumps(configs))
    return list(json.loads(answer.rpartition("FOUND")[2]))


def script(name: str, text: str = "") -> str:
    """What a script of this folder prints; DeepSpeed is imported there, and not into the tests."""
    done = subprocess.run(
        [sys.executable, str(HERE / name)],
        input=text,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
