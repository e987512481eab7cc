# SPDX-License-Identifier: Apache-2.0
"""One-time runs on the fake workspace: submitted, looked at, listed, cancelled and deleted.

Sources, unless a line says otherwise: databricks-sdk 0.162, ``jobs.JobsAPI`` and ``compute.ClustersAPI``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from deepspeed_provider.testing import cluster_json, run_json
from deepspeed_provider.testing.answers import flag, invalid, page_of, text, whole
from deepspeed_provider.testing.clock import VirtualClock
from deepspeed_provider.testing.run_json import Run
from deepspeed_provider.testing.submissions import LONGEST_TOKEN, Offers, accepted
from deepspeed_provider.testing.timeline import Attempt, Behaviour, Phase

RUNS_A_PAGE: Final = 20
MOST_RUNS_A_PAGE: Final = 25
RUN_TYPES: Final = ("JOB_RUN", "SUBMIT_RUN", "WORKFLOW_RUN")
EVENTS_A_PAGE: Final = 50
MOST_EVENTS_A_PAGE: Final = 500
_FOR_EVER_MS: Final = 2**63


class Jobs:
    """All runs of a workspace; safe to use from several threads.

    Args:
        behaviour: what happens to the next run, asked for when one is submitted.
        ended: told once of each attempt whose code has ended, by the first request about a run that finds it so: the
            place to write what the code would have written.
    """

    def __init__(
        self,
        *,
        clock: VirtualClock,
        url: Callable[[], str],
        creator: str,
        behaviour: Callable[[], Behaviour],
        offers: Callable[[], Offers],
        ended: Callable[[Run, str, Attempt], None] = lambda *_: None,
    ) -> None:
        self._clock = clock
        self._url = url
        self._creator = creator
        self._behaviour = behaviour
        self._offers = offers
        self._ended = ended
        self._lock = threading.RLock()
        self._ids = 1000
        self._told: set[int] = set()
        self.runs: dict[int, Run] = {}
        self.deleted_tokens: set[str] = set()

    def submit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``runs/submit``."""
        with self._lock:
            known = self._under_token(body)
            if known is not None:
                return {"run_id": known.run_id}
            body = accepted(body, self._offers())
            run_id = self._next_id()
            self.runs[run_id] = Run(
                run_id=run_id,
                job_id=self._next_id(),
                body=body,
                behaviour=self._behaviour(),
                submitted_ms=self._clock.now_ms,
                creator=self._creator,
                url=f"{self._url()}/?o=1#job/run/{run_id}",
                attempt_ids={(task["task_key"], 0): self._next_id() for task in body["tasks"]},
            )
            return {"run_id": run_id}

    def get(self, run_id: int, query: Mapping[str, Any]) -> dict[str, Any]:
        """``runs/get``, of a run or of an attempt of one of its tasks."""
        with self._lock:
            self._clock.polled()
            now_ms = self._clock.now_ms
            run = self._run(run_id, now_ms)
            if run_id != run.run_id:
                return run_json.task_run(run, run_id, now_ms)
            tasks, tokens = page_of(run_json.tasks(run, now_ms), query, run_json.TASKS_A_PAGE)
            tokens.pop("prev_page_token", None)  # a run has none
            return {**run_json.head(run, now_ms), "tasks": tasks, **tokens}

    def output(self, run_id: int) -> dict[str, Any]:
        """``runs/get-output``, of one task's run; the run's own id does where it has a single task."""
        with self._lock:
            now_ms = self._clock.now_ms
            run = self._run(run_id, now_ms)
            if run_id != run.run_id:
                return run_json.output(run, run_id, now_ms)
            if len(run.tasks) > 1:
                raise invalid("Retrieving the output of runs with multiple tasks is not supported.")
            return run_json.output(run, max(run.attempt_ids.values()), now_ms)

    def listing(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """``runs/list``, the newest first."""
        size = whole(query, "limit", RUNS_A_PAGE) or MOST_RUNS_A_PAGE
        if not 0 < size <= MOST_RUNS_A_PAGE:
            raise invalid(f"limit = {size}: should be between 0 and {MOST_RUNS_A_PAGE}")
        with self._lock:
            self._clock.polled()
            now_ms = self._clock.now_ms
            found, tokens = page_of(self._matching(query, now_ms), query, size)
            answer: dict[str, Any] = {"has_more": "next_page_token" in tokens, **tokens}
            if found:
                answer["runs"] = [self._listed(run, now_ms, flag(query, "expand_tasks")) for run in found]
            return answer

    def cancel(self, run_id: int) -> dict[str, Any]:
        """``runs/cancel``: asynchronous; one that has ended keeps its outcome (databricks/cli testserver)."""
        with self._lock:
            now_ms = self._clock.now_ms
            run = self._run(run_id, now_ms)
            run.cancels += 1
            if run.cancelled_ms is None and _alive(run, now_ms):
                run.cancelled_ms = now_ms
            return {}

    def delete(self, run_id: int) -> dict[str, Any]:
        """``runs/delete``, of one that is not active."""
        with self._lock:
            now_ms = self._clock.now_ms
            run = self._run(run_id, now_ms)
            if _alive(run, now_ms):
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
        """``clusters/get``."""
        with self._lock:
            if cluster_id in self._offers().clusters:
                return cluster_json.existing(cluster_id, self._creator)
            now_ms = self._clock.now_ms
            return cluster_json.cluster(cluster_id, *self._cluster(cluster_id, now_ms), now_ms)

    def cluster_events(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``clusters/events``."""
        cluster_id = text(body, "cluster_id")
        with self._lock:
            found, now_ms = [], self._clock.now_ms
            if cluster_id not in self._offers().clusters:
                found = cluster_json.events(cluster_id, self._cluster(cluster_id, now_ms)[2], now_ms)
        kinds = body.get("event_types")
        since_ms, until_ms = whole(body, "start_time", 0), whole(body, "end_time", _FOR_EVER_MS)
        found = [
            event
            for event in found
            if (not kinds or event["type"] in kinds) and since_ms <= event["timestamp"] <= until_ms
        ]
        if body.get("order", "DESC") == "DESC":
            found.reverse()
        # Sizes out of bounds are no error here: "the server enforces 0 or 500".
        size = min(max(0, whole(body, "page_size", 0)), MOST_EVENTS_A_PAGE) or EVENTS_A_PAGE
        events, tokens = page_of(found, body, size)
        answer: dict[str, Any] = {"events": events, "total_count": len(found), **tokens}
        if "next_page_token" in tokens:
            # The SDK's client follows this one.
            answer["next_page"] = {**body, "page_token": tokens["next_page_token"]}
        return answer

    def _under_token(self, body: Mapping[str, Any]) -> Run | None:
        """The run that was submitted under the same token, whatever its payload was."""
        if body.get("idempotency_token") in (None, ""):
            return None
        token = text(body, "idempotency_token")
        if len(token) > LONGEST_TOKEN:
            raise invalid(f"The idempotency token has {len(token)} characters, more than {LONGEST_TOKEN}.")
        if token in self.deleted_tokens:
            raise invalid(f"A run with the idempotency token {token} was deleted.")
        return next((run for run in self.runs.values() if run.token == token), None)

    def _matching(self, query: Mapping[str, Any], now_ms: int) -> list[Run]:
        active, completed = flag(query, "active_only"), flag(query, "completed_only")
        if active and completed:
            raise invalid("active_only and completed_only cannot both be true.")
        run_type = query.get("run_type") or "SUBMIT_RUN"
        if run_type not in RUN_TYPES:
            raise invalid(f"run_type = {run_type!r}: should be one of {', '.join(RUN_TYPES)}")
        since_ms, until_ms = whole(query, "start_time_from", 0), whole(query, "start_time_to", _FOR_EVER_MS)
        job_id = whole(query, "job_id", 0)
        return [
            run
            for run in reversed(self.runs.values())
            if run_type == "SUBMIT_RUN"
            and since_ms <= run.submitted_ms <= until_ms
            and job_id in (0, run.job_id)
            and not (active and not _alive(run, now_ms))
            and not (completed and _alive(run, now_ms))
        ]

    def _listed(self, run: Run, now_ms: int, expand: bool) -> dict[str, Any]:
        self._number(run, now_ms)
        head = run_json.head(run, now_ms)
        if not expand:
            return head
        tasks = run_json.tasks(run, now_ms)
        more = {"has_more": True} if len(tasks) > run_json.TASKS_A_PAGE else {}
        return {**head, "tasks": tasks[: run_json.TASKS_A_PAGE], **more}

    def _run(self, run_id: int, now_ms: int) -> Run:
        """The run of this id, or the one that a task's run of this id is part of."""
        for run in self.runs.values():
            self._number(run, now_ms)
            if run_id == run.run_id or run_id in run.attempt_ids.values():
                return run
        raise invalid(f"Run {run_id} does not exist.")

    def _cluster(self, cluster_id: str, now_ms: int) -> tuple[Run, str, Attempt]:
        for run in self.runs.values():
            self._number(run, now_ms)
        found = cluster_json.attempts_by_cluster(self.runs.values(), now_ms)
        if cluster_id not in found:
            raise invalid(f"Cluster {cluster_id} does not exist")
        return found[cluster_id]

    def _number(self, run: Run, now_ms: int) -> None:
        """Gives the attempts that have begun meanwhile their run ids, and tells of those whose code has ended."""
        for task in run.course(now_ms).tasks:
            for attempt in task.attempts:
                at = (task.key, attempt.number)
                if at not in run.attempt_ids:
                    run.attempt_ids[at] = self._next_id()
                if now_ms >= attempt.ends_ms and run.attempt_ids[at] not in self._told:
                    self._told.add(run.attempt_ids[at])
                    self._ended(run, task.key, attempt)

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids


def _alive(run: Run, now_ms: int) -> bool:
    return run.course(now_ms).phase is not Phase.ENDED
