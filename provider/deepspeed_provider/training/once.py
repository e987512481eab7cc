# SPDX-License-Identifier: Apache-2.0
"""A generation runs once: the mark of its start, and the failure that is nearest to the cause."""

from __future__ import annotations

import json
import socket
import sys
import time

from . import failures, storage
from .ranks import Rank, peak_memory_bytes


def mark_started(output_uri: str, token: str, rank: Rank) -> bool:
    """Whether this is the first start of the rank in this folder."""
    marker = {"token": token, "rank": rank.rank, "host": socket.gethostname(), "time": time.time()}
    text = json.dumps(marker, sort_keys=True) + "\n"
    return storage.create_text(storage.join(output_uri, f"started-rank{rank.rank}.json"), text)


def second_start(output_uri: str) -> failures.AlreadyStarted:
    """The error for a start that finds the mark of an earlier one: training twice would be paid twice."""
    return failures.AlreadyStarted(
        f"a run has already started in {output_uri}, and this is a second start of it (a stage retry of the "
        "cluster, or an output folder used twice). It is not trained again; start a new generation."
    )


def write_failure(output_uri: str, error: BaseException, rank: Rank, *, phase: str, step: int | None = None) -> None:
    """Leave this rank's failure file, unless an earlier start has left one: that is nearer to the cause."""
    record = failures.failure_record(
        error,
        rank=rank.rank,
        phase=phase,
        step=step,
        peak_memory_bytes=peak_memory_bytes(rank.use_gpu),
        time_s=time.time(),
    )
    uri = storage.join(output_uri, f"failure-rank{rank.rank}.json")
    try:
        storage.create_text(uri, json.dumps(record, indent=2, sort_keys=True) + "\n")
    except Exception as storage_error:  # noqa: BLE001  (the error itself matters more than its file)
        print(f"{uri} cannot be written: {storage_error}", file=sys.stderr, flush=True)  # noqa: T201
