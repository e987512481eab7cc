# SPDX-License-Identifier: Apache-2.0
"""Questions about runs of a workspace, and what their answers mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from deepspeed_provider.backends.base import BackendUnavailable, RunState, RunStatus
from deepspeed_provider.backends.jobs_states import status_of
from deepspeed_provider.backends.workspace_wire import WireRefused, WorkspaceWire

JOBS: Final = "2.2/jobs/runs"
UNKNOWN_CODES: Final = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")
# The API gives no more at once.
RUNS_A_PAGE: Final = 25


def active_runs(page_token: str | None = None) -> tuple[str, dict[str, Any]]:
    """(path, query) of one page of the active runs that were submitted rather than made by jobs."""
    query: dict[str, Any] = {"active_only": "true", "run_type": "SUBMIT_RUN", "limit": RUNS_A_PAGE}
    return f"{JOBS}/list", query if page_token is None else {**query, "page_token": page_token}


async def status_in_loop(wire: WorkspaceWire, run_id: str) -> RunStatus:
    """The state of one run, asked for in an event loop."""
    try:
        with patience():
            return status_of(await wire.aget(f"{JOBS}/get", {"run_id": run_id}))
    except WireRefused as refused:
        return unknown_run(refused)


@contextmanager
def patience() -> Iterator[None]:
    """A refused token says nothing about the run: it may be renewed before the deadline."""
    try:
        yield
    except WireRefused as refused:
        if refused.status in (401, 403):
            raise BackendUnavailable(f"the workspace refuses us: {refused}") from refused
        raise


@contextmanager
def patience_with_tokens() -> Iterator[None]:
    """The same where a permission may well be lacking for good."""
    try:
        yield
    except WireRefused as refused:
        if refused.of_token:
            raise BackendUnavailable(f"the workspace refuses our token: {refused}") from refused
        raise


def is_unknown(refused: WireRefused) -> bool:
    """Whether the workspace says that it holds no such run."""
    return refused.status in (400, 404) and refused.error_code in UNKNOWN_CODES


def unknown_run(refused: WireRefused) -> RunStatus:
    """The state of a run that the workspace says it does not hold: its token tells whether that is so.

    Raises BackendUnavailable for any other refusal, which says nothing about the run.
    """
    if is_unknown(refused):
        return RunStatus(state=RunState.UNSEEN, detail=str(refused))
    raise BackendUnavailable(f"the workspace does not say how the run is: {refused}") from refused
