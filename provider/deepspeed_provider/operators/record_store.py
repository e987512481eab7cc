# SPDX-License-Identifier: Apache-2.0
"""Where a task keeps the record of its run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed_provider.runs.record import RunRecord

if TYPE_CHECKING:
    from airflow.sdk import Context

RECORD_KEY = "run"


class TaskStateRecordStore:
    """The record under one key of Airflow's task state store: it survives tries and clears.

    The store is the task's current attempt's: one that was cleared or replaced finds nothing in it.
    """

    def __init__(self, context: Context) -> None:
        self._state = context["task_state_store"]

    def load(self) -> RunRecord | None:
        wire = self._state.get(RECORD_KEY)
        return RunRecord.from_json(wire) if isinstance(wire, dict) else None

    def save(self, record: RunRecord) -> None:
        self._state.set(RECORD_KEY, record.to_json())


class NoStore:
    """For stopping alone, which stores nothing."""

    def load(self) -> RunRecord | None:
        return None

    def save(self, record: RunRecord) -> None: ...
