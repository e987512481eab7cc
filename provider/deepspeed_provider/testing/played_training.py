# SPDX-License-Identifier: Apache-2.0
"""What a training of this provider would have left behind on the fake workspace, where nothing trains.

Its driver side (``training/driver_side.py``) writes files and prints marked lines; for a run that was started by it the
same is left here, as its scripted ending says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deepspeed_provider.backends.workspace_files import path_of
from deepspeed_provider.testing.files import Files
from deepspeed_provider.testing.results import usual_result
from deepspeed_provider.testing.run_json import Run
from deepspeed_provider.testing.timeline import Attempt
from deepspeed_provider.training.driver_side import FAILURE_MARK, RESULT_MARK, RETURNED


def play(files: Files, run: Run, task_key: str, attempt: Attempt) -> None:
    """To be called when the attempt's code has ended. Other programs than ours leave nothing."""
    request = _request(files, run.task(task_key))
    if request is None or attempt.ends_ms <= attempt.starts_ms:
        return
    left, printed = _left(request, attempt)
    # Where only the cluster can write, nobody here can read either.
    if (folder := path_of(request["output_uri"])) is not None:
        for name, content in left.items():
            files.write(f"{folder}/{name}", json.dumps(content).encode())
    run.printed[run.attempt_ids[task_key, attempt.number]] = "\n".join(printed)


def _request(files: Files, task: Mapping[str, Any]) -> dict[str, Any] | None:
    words: list[str] = list((task.get("spark_python_task") or {}).get("parameters") or [])
    if len(words) != 1 or words[0] not in files.contents:
        return None
    found: dict[str, Any] = json.loads(files.contents[words[0]])
    return found if {"token", "entry", "output_uri"} <= set(found) else None


def _left(request: Mapping[str, Any], attempt: Attempt) -> tuple[dict[str, Any], list[str]]:
    """(files by name, printed lines)."""
    ranks = range(request["nodes"] * request["gpus_per_node"])
    left: dict[str, Any] = {f"started-rank{rank}.json": {"token": request["token"], "rank": rank} for rank in ranks}
    if attempt.ending.succeeded:
        value = {**usual_result(request), **attempt.ending.result}
        returned = {"token": request["token"], "value": value}
        left |= {"result.json": {**value, "token": request["token"]}, RETURNED: returned}
        return left, [RESULT_MARK + json.dumps(returned)]
    left |= {f"failure-rank{rank}.json": dict(record) for rank, record in attempt.ending.failures.items()}
    return left, [FAILURE_MARK + json.dumps(dict(record)) for record in attempt.ending.failures.values()]
