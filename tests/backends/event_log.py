"""What the Spark server itself wrote down, so that runs are not counted by our own handles."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path


def jobs_of_operation(event_dir: Path, operation_id: str) -> int:
    """How many Spark jobs the server started for an operation, over all its event logs."""
    count = 0
    for log in event_dir.iterdir():
        for line in log.read_text(errors="replace").splitlines():
            if '"SparkListenerJobStart"' not in line or operation_id not in line:
                continue
            count += operation_id in json.loads(line)["Properties"].get("spark.job.tags", "")
    return count


def jobs_by_end(event_dir: Path) -> Counter[str]:
    """How many jobs are ``running``, ended ``well`` and ``failed``, cancelled ones included."""
    started, ends = 0, Counter[str]()
    for log in event_dir.iterdir():
        for line in log.read_text(errors="replace").splitlines():
            started += '"SparkListenerJobStart"' in line
            if '"SparkListenerJobEnd"' in line:
                ends["well" if '"JobSucceeded"' in line else "failed"] += 1
    return Counter({"running": started - ends.total(), **ends})
