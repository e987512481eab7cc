# SPDX-License-Identifier: Apache-2.0
"""What ``runs/submit`` of the fake workspace takes, and what it refuses.

Sources, unless a line says otherwise: databricks-sdk 0.162, ``jobs.SubmitRun``, ``jobs.SubmitTask``,
``compute.ClusterSpec``. How a refusal is worded is this fake's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from deepspeed_provider.testing.answers import invalid, whole

LONGEST_TOKEN: Final = 64
LONGEST_TASK_KEY: Final = 100
WORK: Final = (
    "ai_runtime_task",
    "notebook_task",
    "python_wheel_task",
    "spark_jar_task",
    "spark_python_task",
    "spark_submit_task",
    "sql_task",
)
COMPUTE: Final = ("new_cluster", "existing_cluster_id", "environment_key")
# Fields of a task that the older shape has at its top level; time-out and notifications there are the run's.
_OF_TASK: Final = {*WORK, *COMPUTE, "libraries", "depends_on", "max_retries"}
_NUMBERS: Final = {
    "num_workers",
    "min_workers",
    "max_workers",
    "timeout_seconds",
    "max_retries",
    "min_retry_interval_millis",
}


@dataclass(frozen=True, kw_only=True)
class Offers:
    """What there is to submit to: ids and keys."""

    node_types: frozenset[str]
    spark_versions: frozenset[str]
    clusters: frozenset[str]


def accepted(body: Mapping[str, Any], offers: Offers) -> Mapping[str, Any]:
    """The body with its tasks and its numbers as such. Raises Refused."""
    body = _in_tasks(_with_numbers(body))
    known: set[str] = set()
    for task in body["tasks"]:
        key = task.get("task_key")
        if not isinstance(key, str) or not 0 < len(key) <= LONGEST_TASK_KEY or key in known:
            raise invalid(f"task_key = {key!r}: should be unique and have 1 to {LONGEST_TASK_KEY} characters")
        strangers = [each for each in task.get("depends_on") or () if each.get("task_key") not in known]
        if strangers:
            raise invalid(f"Task {key} depends on {strangers}, which no task before it is called.")
        if (run_if := task.get("run_if", "ALL_SUCCESS")) != "ALL_SUCCESS":
            raise invalid(f"Task {key}: run_if = {run_if!r} is nothing that this fake workspace can do.")
        known.add(key)
        _check_work(key, task)
        _check_compute(key, task, offers)
    # databricks/cli testserver: a missing provider is refused, with a list of them.
    if body.get("git_source") and not body["git_source"].get("git_provider"):
        raise invalid("git_source.git_provider is missing: give one of gitHub, gitLab, bitbucketCloud, …")
    return body


def _with_numbers(body: Any, name: str = "") -> Any:
    """Numbers in quotes are numbers too: the Databricks provider's operator sends all of them so."""
    if isinstance(body, Mapping):
        return {key: _with_numbers(value, key) for key, value in body.items()}
    if isinstance(body, list):
        return [_with_numbers(each) for each in body]
    return whole({name: body}, name) if name in _NUMBERS else body


def _in_tasks(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A body of the older shape, with one task at its top level, as one with tasks."""
    if body.get("tasks"):
        return body
    if not any(name in body for name in WORK):
        raise invalid("tasks is empty: give at least one.")
    task = {"task_key": body.get("task_key", "task"), **{name: body[name] for name in _OF_TASK if name in body}}
    return {**{name: value for name, value in body.items() if name not in _OF_TASK}, "tasks": [task]}


def _check_work(key: str, task: Mapping[str, Any]) -> None:
    if sum(name in task for name in WORK) != 1:
        raise invalid(f"Task {key} should have exactly one of {', '.join(WORK)}.")
    script = task.get("spark_python_task")
    if script is None:
        return
    if not script.get("python_file"):
        raise invalid(f"Task {key}: spark_python_task.python_file is missing.")
    wrong = [word for word in script.get("parameters") or () if not isinstance(word, str)]
    if wrong:
        raise invalid(f"Task {key}: spark_python_task.parameters should be strings, not {wrong[0]!r}.")


def _check_compute(key: str, task: Mapping[str, Any], offers: Offers) -> None:
    if sum(bool(task.get(name)) for name in COMPUTE) != 1:
        raise invalid(f"Task {key} should have exactly one of {', '.join(COMPUTE)}.")
    existing = task.get("existing_cluster_id")
    if existing and existing not in offers.clusters:
        raise invalid(f"Task {key}: cluster {existing} does not exist.")
    if task.get("new_cluster"):
        _check_cluster(f"Task {key}: new_cluster", task["new_cluster"], offers)


def _check_cluster(where: str, cluster: Mapping[str, Any], offers: Offers) -> None:
    if cluster.get("spark_version") not in offers.spark_versions:
        raise invalid(f"{where}.spark_version = {cluster.get('spark_version')!r} is not supported.")
    named = [cluster[name] for name in ("node_type_id", "driver_node_type_id") if cluster.get(name)]
    strangers = [node_type for node_type in named if node_type not in offers.node_types]
    if strangers:
        raise invalid(f"{where}: node type {strangers[0]!r} is not supported. Is it in this region?")
    if bool(cluster.get("node_type_id")) == bool(cluster.get("instance_pool_id")):
        raise invalid(f"{where} should have either node_type_id or instance_pool_id.")
    simple = [name for name in ("is_single_node", "use_ml_runtime") if name in cluster]
    if simple and not cluster.get("kind"):
        raise invalid(f"{where}.{simple[0]} needs kind.")
    if not cluster.get("is_single_node") and not ("num_workers" in cluster or "autoscale" in cluster):
        raise invalid(f"{where} should have num_workers or autoscale.")
