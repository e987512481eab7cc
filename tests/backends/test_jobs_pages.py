# SPDX-License-Identifier: Apache-2.0
"""Addresses for people, of runs as the API has them."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_provider.backends.base import RunPages
from deepspeed_provider.backends.jobs_pages import pages_of

HOST = "https://adb-1.azuredatabricks.net"
PAGE = f"{HOST}/jobs/7/runs/8?o=123"
LOGS = f"{HOST}/compute/sparkui/{{}}/driver-logs"


def attempt(number: int, cluster_id: str | None, end_time: int = 0) -> dict[str, Any]:
    cluster = {"cluster_instance": {"cluster_id": cluster_id}} if cluster_id else {}
    return {"task_key": "deepspeed", "attempt_number": number, "end_time": end_time, **cluster}


CASES: dict[str, tuple[dict[str, Any], RunPages]] = {
    "no page": ({"tasks": [attempt(0, "c")]}, RunPages()),
    "waiting for a cluster": ({"run_page_url": PAGE, "tasks": [attempt(0, None)]}, RunPages(run=PAGE)),
    "a list's entry": ({"run_page_url": PAGE}, RunPages(run=PAGE)),
    "running": (
        {"run_page_url": PAGE, "tasks": [attempt(0, "c-1")]},
        RunPages(run=PAGE, cluster_logs=LOGS.format("c-1") + "?o=123"),
    ),
    "the newest attempt": (
        {"run_page_url": PAGE, "tasks": [attempt(1, "c-2"), attempt(0, "c-1", 5)]},
        RunPages(run=PAGE, cluster_logs=LOGS.format("c-2") + "?o=123"),
    ),
    "a page with a fragment": (
        {"run_page_url": f"{HOST}/?o=9#job/7/run/8", "tasks": [attempt(0, "c")]},
        RunPages(run=f"{HOST}/?o=9#job/7/run/8", cluster_logs=LOGS.format("c") + "?o=9"),
    ),
    "no workspace number": (
        {"run_page_url": f"{HOST}/#job/7/run/8", "tasks": [attempt(0, "c")]},
        RunPages(run=f"{HOST}/#job/7/run/8", cluster_logs=LOGS.format("c")),
    ),
}


@pytest.mark.parametrize(("run", "pages"), CASES.values(), ids=CASES)
def test_where_to_look(run: dict[str, Any], pages: RunPages) -> None:
    assert pages_of(run) == pages
