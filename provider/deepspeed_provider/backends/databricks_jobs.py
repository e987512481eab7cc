# SPDX-License-Identifier: Apache-2.0
"""Runs through the Databricks Jobs API: one task, submitted under an idempotency token.

The token is the run's identity. It makes a submission that is sent again the same run, and it is the only way to find
out whether a run that nothing was noted of has arrived: the API has no look-up by token.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from deepspeed_provider.backends.base import (
    BackendUnavailable,
    RunHandle,
    RunIdentity,
    RunPages,
    RunRequest,
    RunState,
    RunStatus,
)
from deepspeed_provider.backends.cluster_fit import require_fit
from deepspeed_provider.backends.jobs_body import JobSettings, name_mark, submit_body
from deepspeed_provider.backends.jobs_evidence import TaskEvidence, failure_of, marked
from deepspeed_provider.backends.jobs_pages import pages_of
from deepspeed_provider.backends.jobs_queries import (
    JOBS,
    active_runs,
    is_unknown,
    patience,
    patience_with_tokens,
    unknown_run,
)
from deepspeed_provider.backends.jobs_states import billed_seconds, latest_attempts, status_of
from deepspeed_provider.backends.workspace_files import WorkspaceFiles, path_of
from deepspeed_provider.backends.workspace_wire import WireRefused, WorkspaceWire
from deepspeed_provider.errors import Failure, FailureKind, FineTuneError, SpecError
from deepspeed_provider.training.code_archive import build_code_archive, training_code
from deepspeed_provider.training.driver_side import RESULT_MARK, RETURNED, launch_script

log = logging.getLogger(__name__)

CLUSTERS: Final = "2.1/clusters"
REQUEST_FILE: Final = "request.json"
_SCRIPT: Final = "launch.py"
GONE_ID: Final = "gone"


class DatabricksJobsBackend:
    """The six verbs of ``Backend`` on one workspace.

    Args:
        wire: carries requests; the Databricks provider's hook with what it lacks.
        settings: how runs are submitted; needed by ``submit`` only.
    """

    name = "databricks_jobs"

    def __init__(self, wire: WorkspaceWire, settings: JobSettings | None = None) -> None:
        self._wire = wire
        self._settings = settings
        self._files = WorkspaceFiles(wire)

    def mint(self, request: RunRequest, identity: RunIdentity) -> RunHandle:
        return RunHandle.minted(self.name, request, identity)

    def submit(self, request: RunRequest, handle: RunHandle) -> RunHandle:
        """Raises SpecError for fields of the user's that contradict ours, and for a cluster that cannot serve the run,
        before anything is sent."""
        # Its state first: whoever has an id knows that it arrived.
        if handle.ids.get("run_id") and self.poll(handle).state not in (RunState.LOST, RunState.UNSEEN):
            return handle
        if self._settings is None:
            raise ValueError("a run is submitted by a backend with job settings")
        folder = self._settings.code_folder.rstrip("/")
        code = _code(request, folder)
        # Where runs leave their files may be storage that only the cluster reads.
        place = f"{path_of(request.output_uri) or f'{folder}/requests/{handle.token}'}/{REQUEST_FILE}"
        body = submit_body(request, handle.token, self._settings, script=code.script, parameters=[place])
        try:
            self._require_fit(request, self._settings, place)
            self._send_code(code)
            self._files.write(place, json.dumps(_request_file(request, handle), indent=2).encode())
            answer = self._wire.post(f"{JOBS}/submit", body)
        except WireRefused as refused:
            if _was_deleted(refused):
                return handle.with_ids(run_id=GONE_ID)
            if refused.after_silence:
                raise BackendUnavailable(f"the submission got no answer, and then a refusal: {refused}") from refused
            raise FineTuneError(_refusal(refused)) from refused
        return handle.with_ids(run_id=str(answer["run_id"]))

    def poll(self, handle: RunHandle) -> RunStatus:
        run_id = handle.ids.get("run_id")
        if run_id == GONE_ID:
            return RunStatus(state=RunState.LOST, detail="somebody deleted the run")
        if run_id is None:
            found = self._alive(handle)
            if found is None:
                return RunStatus(state=RunState.UNSEEN, detail="no run of this name is active")
            return replace(status_of(found), ids={"run_id": str(found["run_id"])})
        try:
            with patience():
                return status_of(self._wire.get(f"{JOBS}/get", {"run_id": run_id}))
        except WireRefused as refused:
            return unknown_run(refused)

    def result(self, handle: RunHandle) -> Any:
        run_id = handle.ids.get("run_id")
        try:
            with patience():
                run = self._whole(run_id or "")
        except WireRefused as refused:
            raise FineTuneError(_lost(str(refused))) from refused
        status = status_of(run)
        if not status.state.terminal:
            raise ValueError(f"run {handle.token[:12]} has no result yet: it is {status.state}")
        if status.state is not RunState.SUCCEEDED:
            raise FineTuneError(failure_of(run, [self._evidence(task) for task in latest_attempts(run)]))
        for kept in self._returned(handle, run):
            if kept.get("token") == handle.token:
                return kept.get("value")
        raise FineTuneError(_no_result(run))

    def cancel(self, handle: RunHandle) -> None:
        run_id = handle.ids.get("run_id")
        if run_id is None:
            found = self._alive(handle)
            if found is None:
                return
            run_id = str(found["run_id"])
        if run_id == GONE_ID:
            return
        try:
            with patience():
                self._wire.post(f"{JOBS}/cancel", {"run_id": int(run_id)})
        except WireRefused as refused:
            if not is_unknown(refused):
                raise BackendUnavailable(f"the workspace does not cancel the run: {refused}") from refused

    def read_texts(self, uri_pattern: str) -> dict[str, str]:
        """Nothing of storage that the workspace does not read."""
        path = path_of(uri_pattern)
        with patience():
            return {} if path is None else self._files.read_texts(path)

    def pages(self, handle: RunHandle) -> RunPages:
        """The run's page, and the driver's logs on its cluster."""
        if not handle.ids.get("run_id") or handle.ids["run_id"] == GONE_ID:
            return RunPages()
        return pages_of(self._wire.get(f"{JOBS}/get", {"run_id": handle.ids["run_id"]}))

    def billed_seconds(self, handle: RunHandle, now_ms: float) -> float | None:
        """How long clusters of the run have been there, their start included."""
        run_id = handle.ids.get("run_id")
        return None if not run_id or run_id == GONE_ID else billed_seconds(self._whole(run_id), now_ms)

    def _require_fit(self, request: RunRequest, settings: JobSettings, place: str) -> None:
        """Not of a request that lies there: it may have become a run, which a change of its cluster must not hide."""
        folder, _, name = place.rpartition("/")
        if settings.existing_cluster_id and name in self._files.names(folder):
            return
        try:
            require_fit(request, settings, lambda found: self._wire.get(f"{CLUSTERS}/get", {"cluster_id": found}))
        except SpecError:
            # A cluster of its own is judged without asking anybody.
            if settings.existing_cluster_id or name not in self._files.names(folder):
                raise

    def _send_code(self, code: _Code) -> None:
        """Once for each content, by which the folder is named. The script comes last, and stands for both."""
        if _SCRIPT not in self._files.names(code.folder):
            self._files.write(code.archive, code.data)
            self._files.write(code.script, launch_script(code.archive.rpartition("/")[2]).encode())

    def _alive(self, handle: RunHandle) -> dict[str, Any] | None:
        """The active run of this handle's name, when nothing was noted of its submission."""
        page_token: str | None = None
        while True:
            with patience():
                answer = self._wire.get(*active_runs(page_token))
            for run in answer.get("runs") or ():
                if str(run.get("run_name", "")).endswith(name_mark(handle.token)):
                    return dict(run)
            page_token = answer.get("next_page_token")
            if not page_token:
                return None

    def _whole(self, run_id: str) -> dict[str, Any]:
        """The run with the tasks of all its pages."""
        run: dict[str, Any] = {}
        query: dict[str, Any] = {"run_id": run_id}
        while True:
            answer = self._wire.get(f"{JOBS}/get", query)
            tasks = [*run.get("tasks", ()), *(answer.get("tasks") or ())]
            run = {**answer, "tasks": tasks}
            if not answer.get("next_page_token"):
                return run
            query = {**query, "page_token": answer["next_page_token"]}

    def _evidence(self, task: Mapping[str, Any]) -> TaskEvidence:
        """Whatever can be read; what cannot be is left out, since something has failed anyway."""
        cluster_id = (task.get("cluster_instance") or {}).get("cluster_id")
        output = self._look(f"{JOBS}/get-output", {"run_id": task.get("run_id")}) if task.get("run_id") else {}
        if cluster_id is None:
            return TaskEvidence(task=task, output=output)
        cluster = self._look(f"{CLUSTERS}/get", {"cluster_id": cluster_id})
        return TaskEvidence(task=task, output=output, cluster=cluster, events=list(self._events(cluster_id)))

    def _look(self, path: str, query: Mapping[str, Any]) -> dict[str, Any]:
        try:
            with patience_with_tokens():
                return self._wire.get(path, query)
        except WireRefused as refused:
            log.info("%s cannot be read: %s", path, refused)
            return {}

    def _events(self, cluster_id: str) -> Iterator[Mapping[str, Any]]:
        body: dict[str, Any] = {"cluster_id": cluster_id, "order": "ASC"}
        while True:
            try:
                with patience_with_tokens():
                    answer = self._wire.post(f"{CLUSTERS}/events", body)
            except WireRefused as refused:
                log.info("events of cluster %s cannot be read: %s", cluster_id, refused)
                return
            yield from answer.get("events") or ()
            if not answer.get("next_page_token"):
                return
            body = {**body, "page_token": answer["next_page_token"]}

    def _returned(self, handle: RunHandle, run: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What the driver side kept, from its file or from the marked line that it printed.

        Of a run that has succeeded nothing else tells the result: whatever is refused is asked for again.
        """
        for text in self.read_texts(f"{handle.output_uri}/{RETURNED}").values():
            try:
                yield json.loads(text)
            except ValueError:
                continue
        for task in latest_attempts(run):
            try:
                with patience():
                    output = self._wire.get(f"{JOBS}/get-output", {"run_id": task.get("run_id")})
            except WireRefused as refused:
                log.info("the output of task run %s cannot be read: %s", task.get("run_id"), refused)
                continue
            yield from marked(str(output.get("logs") or ""), RESULT_MARK)


@dataclass(frozen=True, kw_only=True)
class _Code:
    """The code that travels, and where it lies."""

    folder: str
    archive: str
    data: bytes

    @property
    def script(self) -> str:
        return f"{self.folder}/{_SCRIPT}"


def _code(request: RunRequest, folder: str) -> _Code:
    with tempfile.TemporaryDirectory() as scratch:
        archive = build_code_archive((*training_code(), *request.code), Path(scratch))
        place = f"{folder}/{archive.stem}"
        return _Code(folder=place, archive=f"{place}/{archive.name}", data=archive.read_bytes())


def _request_file(request: RunRequest, handle: RunHandle) -> dict[str, Any]:
    """What the driver side reads (``training/driver_side.py``)."""
    return {
        "token": handle.token,
        "entry": request.entry,
        "payload": dict(request.payload),
        "nodes": request.nodes,
        "gpus_per_node": request.gpus_per_node,
        "use_gpu": request.use_gpu,
        "on_driver": request.on_driver,
        "python": request.python,
        "deepspeed_config": None if request.deepspeed_config is None else dict(request.deepspeed_config),
        "environment": dict(request.environment),
        "output_uri": request.output_uri,
    }


def _was_deleted(refused: WireRefused) -> bool:
    text = refused.message.lower()
    return refused.status == 400 and "token" in text and "deleted" in text


def _refusal(refused: WireRefused) -> Failure:
    """Why nothing was submitted. A token may be renewed before the next try."""
    kind = FailureKind.TRANSIENT if refused.of_token else FailureKind.USER
    return Failure(kind=kind, message=f"Databricks refuses the run: {refused}", evidence="answer to the submission")


def _lost(text: str) -> Failure:
    return Failure(kind=FailureKind.TRANSIENT, message=f"the workspace holds no such run: {text}", evidence="run state")


def _no_result(run: Mapping[str, Any]) -> Failure:
    return Failure(
        kind=FailureKind.UNKNOWN,
        message="the run succeeded, but neither its folder nor its output holds its result",
        evidence="task's output",
        detail=f"run page: {run.get('run_page_url', 'unknown')}",
    )
