# SPDX-License-Identifier: Apache-2.0
"""Python daemons that Spark forks its workers from, and never ends.

Spark keeps one for each session that ever ran Python code, also when the session is closed (Spark 4.3,
``SparkEnv.pythonWorkers``); on an engine that lives for weeks they add up to gigabytes. One that has quit is
started again by Spark when it is needed.
"""

from __future__ import annotations

import contextlib
import time

import psutil

# Longer than a step of data preparation may pause between two calls of Python code.
IDLE_AFTER_SECONDS = 3600.0


def end_idle_daemons(server_pid: int, *, older_than_seconds: float = IDLE_AFTER_SECONDS) -> list[int]:
    """Ends the daemons of a Spark server that serve no worker now; returns their process ids."""
    ended = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(server_pid).children():
            # Processes end meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                old = time.time() - child.create_time() >= older_than_seconds
                if old and "pyspark.daemon" in child.cmdline() and not child.children():
                    child.terminate()
                    ended.append(child.pid)
    return ended
