# SPDX-License-Identifier: Apache-2.0
"""Where people look at a run in the workspace. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

from deepspeed_provider.backends.base import RunPages
from deepspeed_provider.backends.jobs_states import latest_attempts

# Route ``compute/sparkui/:clusterId/driver-logs`` of the workspace's own pages; no API names it.
DRIVER_LOGS: Final = "/compute/sparkui/{cluster_id}/driver-logs"


def pages_of(run: Mapping[str, Any]) -> RunPages:
    """Of a run as ``runs/get`` has it; the logs are of the task that runs, or that ended last."""
    page = run.get("run_page_url")
    if not page:
        return RunPages()
    clusters = [(task.get("cluster_instance") or {}).get("cluster_id") for task in latest_attempts(run)]
    last = next((cluster_id for cluster_id in reversed(clusters) if cluster_id), None)
    return RunPages(run=str(page), cluster_logs=None if last is None else _driver_logs(str(page), str(last)))


def _driver_logs(page: str, cluster_id: str) -> str:
    """On the same workspace, which a run's page may name as ``o``."""
    url = urlsplit(page)
    workspace = parse_qs(url.query).get("o")
    query = urlencode({"o": workspace[0]}) if workspace else ""
    return urlunsplit((url.scheme, url.netloc, DRIVER_LOGS.format(cluster_id=cluster_id), query, ""))
