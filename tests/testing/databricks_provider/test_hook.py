# SPDX-License-Identifier: Apache-2.0
"""What the Databricks provider's hook (7.23) sends, and which bad answers it asks again about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from airflow.providers.databricks.exceptions import DatabricksApiError
from airflow.providers.databricks.hooks.databricks import DatabricksHook
from deepspeed_provider.testing.faults import (
    Fault,
    could_not_acquire_lock,
    lost_request,
    reset_connection,
    server_error,
    too_many_requests,
)
from deepspeed_provider.testing.workspace import FakeWorkspace

from testing.databricks_provider.task import GET, TASK, Pauses

Look = Callable[[DatabricksHook, int], dict[str, Any]]
GARBLED = Fault(status=200, body={}, headers={"Content-Encoding": "gzip"})  # which the body is not


def submitted(tasks: int = 1) -> tuple[DatabricksHook, int, Pauses]:
    """A hook, a run that it submitted, and the hook's pauses, which are only written down."""
    hook, pauses = DatabricksHook(), Pauses()
    hook.retry_args["sleep"] = pauses
    run_id = hook.submit_run({"tasks": [{"task_key": f"t{number}", **TASK} for number in range(tasks)]})
    return hook, run_id, pauses


def a_get_run(hook: DatabricksHook, run_id: int) -> dict[str, Any]:
    async def get() -> dict[str, Any]:
        async with hook:
            return await hook.a_get_run(run_id)

    return asyncio.run(get())


def get_run(hook: DatabricksHook, run_id: int) -> dict[str, Any]:
    return hook.get_run(run_id)


def test_the_connection_passes_its_own_test(workspace: FakeWorkspace) -> None:
    assert DatabricksHook().test_connection() == (True, "Connection successfully tested")


@pytest.mark.parametrize(
    ("look", "in_query"),
    [pytest.param(get_run, True, id="blocking-query"), pytest.param(a_get_run, False, id="async-json_body")],
)
def test_where_the_arguments_of_a_get_are(look: Look, in_query: bool, workspace: FakeWorkspace) -> None:
    hook, run_id, _ = submitted()
    assert look(hook, run_id)["run_id"] == run_id
    [request] = workspace.requests_for(GET)
    assert (request.method, request.version) == ("GET", "2.2")
    assert {name: int(value) for name, value in request.arguments.items()} == {"run_id": run_id}
    assert ("run_id" in request.query) is in_query


@pytest.mark.parametrize("look", [get_run, a_get_run], ids=["blocking", "async"])
def test_a_run_of_many_tasks_comes_in_pages(look: Look, workspace: FakeWorkspace) -> None:
    hook, run_id, _ = submitted(tasks=201)
    assert len({task["task_key"] for task in look(hook, run_id)["tasks"]}) == 201
    assert [request.arguments.get("page_token") for request in workspace.requests_for(GET)].count(None) == 1
    assert len(workspace.requests_for(GET)) == 3


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(too_many_requests(retry_after_s=30), id="429_retry_after_30"),
        pytest.param(server_error(500), id="500"),
        pytest.param(server_error(501), id="501"),
        pytest.param(server_error(503, retry_after_s=30), id="503_retry_after_30"),
        pytest.param(could_not_acquire_lock(), id="400_lock"),
        pytest.param(lost_request(), id="connection_closed"),
        pytest.param(reset_connection(), id="connection_reset"),
    ],
)
def test_what_a_blocking_call_asks_again_about(fault: Fault, workspace: FakeWorkspace) -> None:
    hook, run_id, pauses = submitted()
    workspace.fault(fault, path=GET)
    assert hook.get_run(run_id)["run_id"] == run_id
    assert pauses == [1.0]  # Retry-After is not read
    assert len(workspace.requests_for(GET)) == 2


@pytest.mark.parametrize("look", [get_run, a_get_run], ids=["blocking", "async"])
@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_what_no_call_asks_again_about(status: int, look: Look, workspace: FakeWorkspace) -> None:
    hook, run_id, pauses = submitted()
    workspace.fault(Fault(status=status), path=GET)
    with pytest.raises(DatabricksApiError) as caught:
        look(hook, run_id)
    assert caught.value.http_status_code == status
    assert pauses == []
    assert len(workspace.requests_for(GET)) == 1


@pytest.mark.parametrize(
    ("fault", "error", "requests"),
    [
        # aiohttp itself asks twice where a GET is cut off; then nobody does.
        pytest.param(lost_request(), aiohttp.ServerDisconnectedError, 2, id="ServerDisconnectedError"),
        pytest.param(reset_connection(), aiohttp.ClientOSError, 2, id="ClientOSError"),
        pytest.param(GARBLED, aiohttp.ClientPayloadError, 1, id="ClientPayloadError"),
    ],
)
def test_what_an_async_call_does_not_ask_again_about(
    fault: Fault, error: type[Exception], requests: int, workspace: FakeWorkspace
) -> None:
    hook, run_id, pauses = submitted()
    workspace.fault(fault, path=GET, times=3)
    with pytest.raises(error) as caught:
        a_get_run(hook, run_id)
    assert type(caught.value) is error
    assert pauses == []
    assert len(workspace.requests_for(GET)) == requests
