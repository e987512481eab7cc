"""What the Spark server itself wrote down, so that runs are not counted by our own handles."""

from __future__ import annotations

import json
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
