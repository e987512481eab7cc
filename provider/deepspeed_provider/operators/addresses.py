# SPDX-License-Identifier: Apache-2.0
"""Where people can look at a run: in the log, and in the XComs that links read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_provider.backends.base import RunHandle
from deepspeed_provider.links import CLUSTER_LOGS_URL_KEY, DATABRICKS_RUN_URL_KEY, LINK_NAMES, MLFLOW_URL_KEY
from deepspeed_provider.runs.record import RunRecord


class Addresses:
    """Tells each address once, as soon as it is known.

    :param ti: the task instance, which takes XComs.
    :param links: addresses on the cluster by the XCom of their link; may fail.
    """

    def __init__(self, ti: Any, *, links: Callable[[RunRecord], Mapping[str, str]], log: logging.Logger | Any) -> None:
        self._ti = ti
        self._links = links
        self._log = log
        self._last: RunHandle | None = None
        self._told: dict[str, str] = {}

    @property
    def page(self) -> str | None:
        """Of the run on Databricks."""
        return self._told.get(DATABRICKS_RUN_URL_KEY)

    def tell(self, record: RunRecord) -> None:
        """What is new since the last time: a run gets its page when it is submitted, and a generation all of it."""
        last, self._last = self._last, record.handle
        if last == record.handle:
            return
        if last is None or last.output_uri != record.handle.output_uri:
            self._log.info("Files of the run: %s", record.handle.output_uri)
            # Another generation has another cluster.
            self._told.pop(CLUSTER_LOGS_URL_KEY, None)
        mlflow = {MLFLOW_URL_KEY: record.mlflow_url} if record.mlflow_url else {}
        self._tell({**mlflow, **self._on_cluster(record)})

    def tell_logs(self, record: RunRecord) -> None:
        """Where the cluster's logs are, once there is a cluster."""
        # Only a workspace has them; it is asked once more for each step of progress until it has told.
        if DATABRICKS_RUN_URL_KEY in self._told and CLUSTER_LOGS_URL_KEY not in self._told:
            self._tell(self._on_cluster(record))

    def _tell(self, addresses: Mapping[str, str]) -> None:
        for key, url in addresses.items():
            if self._told.get(key) != url:
                self._told[key] = url
                self._log.info("%s: %s", LINK_NAMES[key], url)
                self._ti.xcom_push(key=key, value=url)

    def _on_cluster(self, record: RunRecord) -> Mapping[str, str]:
        try:
            return self._links(record)
        except Exception as error:  # noqa: BLE001  (links are for people; the run does not depend on them)
            self._log.warning("No link to the run: %s", error)
            return {}
