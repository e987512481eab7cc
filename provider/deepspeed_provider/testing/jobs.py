# SPDX-License-Identifier: Apache-2.0
"""One-time runs on the fake workspace: submitted, looked at, listed, cancelled and deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from deepspeed_provider.testing import cluster_json, run_json
from deepspeed_provider.testing.answers import invalid
from deepspeed_provider.testing.clock import VirtualClock
from deepspeed_provider.testing.run_json import Run
from deepspeed_provider.testing.timeline import Attempt, Behaviour, Phase, TaskCourse

LONGEST_TOKEN: Final = 64
LONGEST_TASK_KEY: Final = 100
RUNS_A_PAGE: Final = 25
ACTIVE: Final = (Phase.BLOCKED, Phase.QUEUED, Phase.PENDING, Phase.RUNNING, Phase.WAITING_FOR_RETRY, Phase.TERMINATING)
WORK: Final = (
    "ai_runtime_task",
    "notebook_task",
    "python_wheel_task",
    "spark_jar_task",
    "spark_python_task",
    "spark_submit_task",
    "sql_task",
)


class Jobs:
    """All runs of a workspace; safe to use from several threads.

    Args:
        behaviour: what happens to the next run, asked for when one is submitted.
        ended: told once of each attempt, when somebody first looks after its code has ended.
    """

    def __init__(
        self,
        *,
        clock: VirtualClock,
        url: Callable[[], str],
        creator: str,
        behaviour: Callable[[], Behaviour],
        node_types: Callable[[], frozenset[str]],
        spark_versions: Callable[[], frozenset[str]],
        existing_clusters: Callable[[], frozenset[str]],
        ended: Callable[[Run, str, Attempt], None] = lambda *_: None,
    ) -> None:
        self._clock = clock
        self._url = url
        self._creator = creator
        self._behaviour = behaviour
        self._node_types = node_types
        self._spark_versions = spark_versions
        self._existing_clusters = existing_clusters
        self._ended = ended
        self._lock = threading.RLock()
        self._ids = 1000
        self._told: set[int] = set()
        self.runs: dict[int, Run] = {}
        self.deleted_tokens: set[str] = set()

    def submit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``runs/submit``."""
        with self._lock:
            token = body.get("idempotency_token")
            if token is not None:
                if len(token) > LONGEST_TOKEN:
                    raise invalid(f"The idempotency token has {len(token)} characters, more than {LONGEST_TOKEN}.")
                if token in self.deleted_tokens:
                    raise invalid(f"A run with the idempotency token {token} was deleted.")
                # Payloads are not compared: the token decides.
                for run in self.runs.values():
                    if run.token == token:
                        return {"run_id": run.run_id}
            body = _in_tasks(body)
            self._check(body)
            run_id = self._next_id()
            self.runs[run_id] = Run(
                run_id=run_id,
                job_id=self._next_id(),
                body=body,
                behaviour=self._behaviour(),
                submitted_ms=self._clock.now_ms,
                creator=self._creator,
                url=f"{self._url()}/?o=1#job/run/{run_id}",
            )
            return {"run_id": run_id}

    def get(self, run_id: int, page_token: str | None = None) -> dict[str, Any]:
        """``runs/get``, of a run or of one of its tasks' attempts."""
        with self._lock:
            self._clock.polled()
            run = self._run(run_id)
            self._number(run)
            return run_json.page(run, self._clock.now_ms, offset=_offset(page_token, "tasks-"))

    def output(self, run_id: int) -> dict[str, Any]:
        """``runs/get-output``."""
        with self._lock:
            run = self._run(run_id)
            tasks = self._number(run)
            for (key, number), attempt_id in run.attempt_ids.items():
                if attempt_id == run_id or (run_id == run.run_id and len(run.tasks) == 1 and len(run.attempt_ids) == 1):
                    task = tasks[key]
                    return run_json.output(run, task, task.attempts[number], self._clock.now_ms)
            raise invalid("Retrieving the output of runs with multiple tasks is not supported; ask for one task's run.")

    def list(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """``runs/list``, the newest first."""
        limit = int(query.get("limit") or RUNS_A_PAGE)
        if not 0 < limit <= RUNS_A_PAGE:
            raise invalid(f"limit = {limit}: should be between 1 and {RUNS_A_PAGE}")
        active, completed = _flag(query, "active_only"), _flag(query, "completed_only")
        if active and completed:
            raise invalid("active_only and completed_only cannot both be true.")
        since_ms, until_ms = int(query.get("start_time_from") or 0), int(query.get("start_time_to") or 2**63)
        with self._lock:
            self._clock.polled()
            now_ms = self._clock.now_ms
            found = []
            for run in reversed(self.runs.values()):
                self._number(run)
                alive = run.course(now_ms).phase in ACTIVE
                wanted = alive if active else not completed or not alive
                if wanted and since_ms <= run.submitted_ms <= until_ms and _of_type(query):
                    found.append(run)
            offset = _offset(query.get("page_token"), "runs-")
            shown = found[offset : offset + limit]
            more = offset + limit < len(found)
            expand = _flag(query, "expand_tasks")
            answer: dict[str, Any] = {"has_more": more}
            if shown:
                answer["runs"] = [run_json.listed(run, now_ms, expand=expand) for run in shown]
            if more:
                answer["next_page_token"] = f"runs-{offset + limit}"
            if offset:
                answer["prev_page_token"] = f"runs-{max(0, offset - limit)}"
            return answer

    def cancel(self, run_id: int) -> dict[str, Any]:
        """``runs/cancel``: asynchronous; one that has ended keeps its outcome."""
        with self._lock:
            run = self._run(run_id)
            run.cancels += 1
            if run.cancelled_ms is None and run.course(self._clock.now_ms).phase is not Phase.ENDED:
                run.cancelled_ms = self._clock.now_ms
            return {}

    def delete(self, run_id: int) -> dict[str, Any]:
        """``runs/delete``, of one that is not active."""
        with self._lock:
            run = self._run(run_id)
            if run.course(self._clock.now_ms).phase in ACTIVE:
                raise invalid(f"Run {run_id} is still active: cancel it first.")
            self.forget(run.run_id)
            return {}

    def forget(self, run_id: int) -> None:
        """The run is gone, as after 60 days or when somebody deleted it."""
        with self._lock:
            run = self.runs.pop(run_id)
            if run.token is not None:
                self.deleted_tokens.add(run.token)

    def cluster(self, cluster_id: str) -> dict[str, Any]:
        """``clusters/get`` of one that a run got."""
        with self._lock:
            run, key, attempt = self._cluster(cluster_id)
            return cluster_json.cluster(cluster_id, run, key, attempt, self._clock.now_ms)

    def cluster_events(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``clusters/events``."""
        cluster_id = str(body.get("cluster_id", ""))
        with self._lock:
            _, _, attempt = self._cluster(cluster_id)
            found = cluster_json.events(cluster_id, attempt, self._clock.now_ms)
        kinds = body.get("event_types")
        found = [event for event in found if not kinds or event["type"] in kinds]
        if body.get("order", "DESC") == "DESC":
            found.reverse()
        size = int(body.get("page_size") or cluster_json.EVENTS_A_PAGE)
        offset = _offset(body.get("page_token"), "events-")
        answer: dict[str, Any] = {"events": found[offset : offset + size], "total_count": len(found)}
        if offset + size < len(found):
            answer["next_page_token"] = f"events-{offset + size}"
        return answer

    def _cluster(self, cluster_id: str) -> tuple[Run, str, Attempt]:
        for run in self.runs.values():
            self._number(run)
        found = cluster_json.attempts_by_cluster(self.runs.values(), self._clock.now_ms)
        if cluster_id not in found:
            raise invalid(f"Cluster {cluster_id} does not exist")
        return found[cluster_id]

    def _run(self, run_id: int) -> Run:
        for run in self.runs.values():
            if run_id == run.run_id or run_id in run.attempt_ids.values():
                return run
        raise invalid(f"Run {run_id} does not exist.")

    def _number(self, run: Run) -> dict[str, TaskCourse]:
        """Gives the attempts that have begun their run ids, and tells of those whose code has ended."""
        now_ms = self._clock.now_ms
        tasks = {task.key: task for task in run.course(now_ms).tasks}
        for key, task in tasks.items():
            for attempt in task.attempts:
                attempt_id = run.attempt_ids.get((key, attempt.number))
                if attempt_id is None:
                    attempt_id = run.attempt_ids[key, attempt.number] = self._next_id()
                if now_ms >= attempt.ends_ms and attempt_id not in self._told:
                    self._told.add(attempt_id)
                    self._ended(run, key, attempt)
        return tasks

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _check(self, body: Mapping[str, Any]) -> None:
        known: set[str] = set()
        for task in body["tasks"]:
            key = task.get("task_key")
            if not key or len(key) > LONGEST_TASK_KEY or key in known:
                raise invalid(f"task_key = {key!r}: should be unique and have 1 to {LONGEST_TASK_KEY} characters")
            strangers = [each["task_key"] for each in task.get("depends_on") or () if each["task_key"] not in known]
            if strangers:
                raise invalid(f"Task {key} depends on {strangers}, which no task before it is called.")
            known.add(key)
            if sum(name in task for name in WORK) != 1:
                raise invalid(f"Task {key} should have exactly one of {', '.join(WORK)}.")
            self._check_words(key, task)
            self._check_compute(key, task)
        providers = (body.get("git_source") or {"git_provider": "any"}).get("git_provider")
        if not providers:
            raise invalid("git_source.git_provider is missing: give one of gitHub, gitLab, bitbucketCloud, …")

    def _check_words(self, key: str, task: Mapping[str, Any]) -> None:
        script = task.get("spark_python_task") or {}
        wrong = [word for word in script.get("parameters") or () if not isinstance(word, str)]
        if wrong:
            raise invalid(f"Task {key}: spark_python_task.parameters should be strings, not {wrong[0]!r}.")

    def _check_compute(self, key: str, task: Mapping[str, Any]) -> None:
        new, existing = task.get("new_cluster"), task.get("existing_cluster_id")
        if existing is not None and existing not in self._existing_clusters():
            raise invalid(f"Task {key}: cluster {existing} does not exist.")
        if new is None:
            if existing is None and not task.get("environment_key"):
                raise invalid(f"Task {key} has no cluster: give new_cluster, existing_cluster_id or environment_key.")
            return
        if new.get("spark_version") not in self._spark_versions():
            raise invalid(f"Task {key}: Spark version {new.get('spark_version')!r} is not supported.")
        named = [new[name] for name in ("node_type_id", "driver_node_type_id") if new.get(name)]
        for node_type_id in named:
            if node_type_id not in self._node_types():
                raise invalid(f"Task {key}: node type {node_type_id!r} is not supported. Is it in this region?")
        if not named and not new.get("instance_pool_id"):
            raise invalid(f"Task {key}: new_cluster has neither node_type_id nor instance_pool_id.")
        # Numbers in quotes are numbers too: the Databricks provider's operator sends them so.
        if not str(new.get("num_workers")).isdigit() and "autoscale" not in new and not new.get("is_single_node"):
            raise invalid(f"Task {key}: num_workers = {new.get('num_workers')!r} should be an integer.")


def _in_tasks(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A body of the older shape, with one task at its top level, as one with tasks."""
    if body.get("tasks"):
        return body
    named = [name for name in WORK if name in body]
    if not named:
        raise invalid("tasks is empty: give at least one.")
    of_task = {
        *named,
        "new_cluster",
        "existing_cluster_id",
        "libraries",
        "depends_on",
        "max_retries",
        "environment_key",
    }
    task = {"task_key": body.get("task_key", "task"), **{name: body[name] for name in of_task if name in body}}
    return {**{name: value for name, value in body.items() if name not in of_task}, "tasks": [task]}


def _flag(query: Mapping[str, Any], name: str) -> bool:
    return str(query.get(name, "false")).lower() == "true"


def _of_type(query: Mapping[str, Any]) -> bool:
    return query.get("run_type") in (None, "", "SUBMIT_RUN")


def _offset(token: object, prefix: str) -> int:
    if not token:
        return 0
    if not isinstance(token, str) or not token.startswith(prefix) or not token.removeprefix(prefix).isdigit():
        raise invalid(f"page_token = {token!r} is none that was given out.")
    return int(token.removeprefix(prefix))
