# SPDX-License-Identifier: Apache-2.0
"""What Airflow says about a task, asked by the process that may have to cancel the task's run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# States in which nobody will attach to the run again. Any other may be a task that was cleared, or
# moved to another triggerer, whose new attempt already watches the same run (apache/airflow#73454).
TERMINAL_TASK_STATES = frozenset({"failed", "success", "skipped", "removed", "upstream_failed"})

RUNNING = "running"
RESTARTING = "restarting"
"""Somebody cleared the task while it was running; its next attempt comes when its process has ended."""


def task_key(ti: Any) -> dict[str, Any]:
    """Names a task instance, whatever its try; JSON-able. ``map_index`` is -1 for a task that is not mapped."""
    return {
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "task_id": ti.task_id,
        "map_index": -1 if ti.map_index is None else ti.map_index,
    }


def states_query(key: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``RuntimeTaskInstance.get_task_states`` for one task instance."""
    query: dict[str, Any] = {"dag_id": key["dag_id"], "task_ids": [key["task_id"]], "run_ids": [key["run_id"]]}
    if key.get("map_index", -1) >= 0:
        query["map_index"] = key["map_index"]
    return query


def state_of(states: Mapping[str, Mapping[str, Any]], key: Mapping[str, Any]) -> str | None:
    """The state of one task instance in the execution API's answer, which names a mapped one with its index."""
    map_index = key.get("map_index", -1)
    name = key["task_id"] if map_index < 0 else f"{key['task_id']}_{map_index}"
    state = states.get(key["run_id"], {}).get(name)
    return None if state is None else str(getattr(state, "value", state))


def ask_task_states(**query: Any) -> Mapping[str, Mapping[str, Any]]:
    """Asks through the process's own supervisor. Blocks; not for an event loop."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states: Mapping[str, Mapping[str, Any]] = RuntimeTaskInstance.get_task_states(**query)
    return states
