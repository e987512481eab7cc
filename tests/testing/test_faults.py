# SPDX-License-Identifier: Apache-2.0
"""What can go wrong on the way to the workspace, over real connections; and what stopping it leaves: nothing."""

from __future__ import annotations

import gc
import random
import socket
import threading
import time
from typing import Any

import httpx
import psutil
import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import PermissionDenied
from databricks.sdk.service.jobs import SubmitTask
from deepspeed_provider.testing.faults import (
    Fault,
    RandomFaults,
    could_not_acquire_lock,
    every_kind,
    late,
    lost_request,
    lost_response,
    refused_token,
    reset_connection,
    server_error,
    too_many_requests,
)
from deepspeed_provider.testing.workspace import FakeWorkspace

from testing.asking import Asking, task

SUBMIT, GET = "jobs/runs/submit", "jobs/runs/get"


@pytest.mark.parametrize(
    ("fault", "error", "runs"),
    [
        pytest.param(lost_request(), httpx.RemoteProtocolError, 0, id="dropped before the write"),
        pytest.param(lost_response(), httpx.RemoteProtocolError, 1, id="dropped after the write"),
        pytest.param(reset_connection(), httpx.ReadError, 0, id="reset before the write"),
        pytest.param(Fault(drop=True, reset=True, after=True), httpx.ReadError, 1, id="reset after the write"),
        pytest.param(server_error(), httpx.HTTPStatusError, 0, id="failed before the write"),
        pytest.param(server_error(after=True), httpx.HTTPStatusError, 1, id="failed after the write"),
    ],
)
def test_an_answer_that_is_lost(
    workspace: FakeWorkspace, asking: Asking, fault: Fault, error: type[Exception], runs: int
) -> None:
    workspace.fault(fault, path=SUBMIT)
    with pytest.raises(error):
        asking.submit(idempotency_token="t")
    assert len(workspace.runs) == runs
    run_id = asking.submit(idempotency_token="t")
    assert [run.run_id for run in workspace.runs] == [run_id]
    assert [request.status for request in workspace.requests_for(SUBMIT)] == [fault.status or 0, 200]


@pytest.mark.parametrize(
    ("fault", "status", "error_code", "retry_after"),
    [
        pytest.param(too_many_requests(7), 429, "REQUEST_LIMIT_EXCEEDED", "7", id="too many"),
        pytest.param(too_many_requests(None), 429, "REQUEST_LIMIT_EXCEEDED", None, id="too many, no word of when"),
        pytest.param(server_error(), 503, "TEMPORARILY_UNAVAILABLE", None, id="unavailable"),
        pytest.param(server_error(retry_after_s=9), 503, "TEMPORARILY_UNAVAILABLE", "9", id="unavailable until"),
        pytest.param(server_error(500), 500, "TEMPORARILY_UNAVAILABLE", None, id="failed"),
        pytest.param(refused_token(), 403, "PERMISSION_DENIED", None, id="forbidden"),
        pytest.param(refused_token(401), 401, "UNAUTHENTICATED", None, id="unauthenticated"),
        pytest.param(could_not_acquire_lock(), 400, "COULD_NOT_ACQUIRE_LOCK", None, id="no lock"),
    ],
)
def test_a_refusal(
    workspace: FakeWorkspace, asking: Asking, fault: Fault, status: int, error_code: str, retry_after: str | None
) -> None:
    workspace.fault(fault)
    response = asking.http.get("2.0/preview/scim/v2/Me")
    assert (response.status_code, response.json()["error_code"]) == (status, error_code)
    assert response.headers.get("Retry-After") == retry_after
    assert asking.http.get("2.0/preview/scim/v2/Me").status_code == 200


def statuses(workspace: FakeWorkspace, asking: Asking, requests: list[tuple[str, str]]) -> list[int]:
    for method, path in requests:
        asking.http.request(method, path)
    return [request.status for request in workspace.requests]


@pytest.mark.parametrize(
    ("planned", "failed"),
    [
        pytest.param({}, [0], id="the next request"),
        pytest.param({"times": 3}, [0, 1, 2], id="a storm"),
        pytest.param({"skip": 2}, [2], id="not at once"),
        pytest.param({"path": "clusters/*", "times": 9}, [1, 3], id="some paths"),
        pytest.param({"method": "HEAD"}, [4], id="a method"),
        pytest.param({"path": "clusters/*", "skip": 1, "times": 9}, [3], id="the second of a path"),
    ],
)
def test_which_requests_go_wrong(
    workspace: FakeWorkspace, asking: Asking, planned: dict[str, Any], failed: list[int]
) -> None:
    workspace.fault(server_error(), **planned)
    cluster, me, file = "2.1/clusters/spark-versions", "2.0/preview/scim/v2/Me", "2.0/fs/files/Volumes/a/b/c/d"
    asked = statuses(workspace, asking, [("GET", me), ("GET", cluster), ("GET", me), ("GET", cluster), ("HEAD", file)])
    assert [number for number, status in enumerate(asked) if status == 503] == failed


def test_faults_come_in_the_order_in_which_they_were_planned(workspace: FakeWorkspace, asking: Asking) -> None:
    for fault in (server_error(500), server_error(502), too_many_requests()):
        workspace.fault(fault)
    assert statuses(workspace, asking, [("GET", "2.0/preview/scim/v2/Me")] * 4) == [500, 502, 429, 200]


def test_faults_to_come_can_be_called_off(workspace: FakeWorkspace, asking: Asking) -> None:
    workspace.fault(server_error(), times=100)
    workspace.faults.clear()
    assert asking.submit()


def test_a_late_answer_is_the_usual_one_and_keeps_nobody_else_waiting(workspace: FakeWorkspace, asking: Asking) -> None:
    workspace.fault(late(30), path=SUBMIT)
    with pytest.raises(httpx.ReadTimeout):
        asking.http.post("2.2/jobs/runs/submit", json={"tasks": [task()], "idempotency_token": "t"}, timeout=0.2)
    assert len(workspace.runs) == 1
    assert asking.submit(idempotency_token="t") == workspace.runs[0].run_id


def test_a_late_answer_comes(workspace: FakeWorkspace, asking: Asking) -> None:
    workspace.fault(late(0.2))
    before = time.monotonic()
    assert asking.submit()
    assert time.monotonic() - before >= 0.2


def test_the_sdk_rides_out_a_storm(workspace: FakeWorkspace, client: WorkspaceClient) -> None:
    workspace.fault(too_many_requests(0), path=SUBMIT)
    workspace.fault(server_error(retry_after_s=0), path=SUBMIT)
    submitted = client.jobs.submit(idempotency_token="t", tasks=[SubmitTask.from_dict(task())])
    assert [run.run_id for run in workspace.runs] == [submitted.run_id]
    assert [request.status for request in workspace.requests_for(SUBMIT)] == [429, 503, 200]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({"Authorization": "Bearer dapi-fake"}, 200, id="good"),
        pytest.param({"Authorization": "Bearer dapi-old"}, 403, id="unknown"),
        pytest.param({}, 401, id="none"),
    ],
)
def test_a_token_is_asked_for(workspace: FakeWorkspace, headers: dict[str, str], status: int) -> None:
    with httpx.Client(headers=headers) as client:
        assert client.get(f"{workspace.url}/api/2.0/preview/scim/v2/Me").status_code == status
        assert client.get(f"{workspace.url}/").status_code == 200  # the page for people


def test_a_token_that_is_revoked_and_replaced_while_a_run_goes_on(
    workspace: FakeWorkspace, client: WorkspaceClient
) -> None:
    run_id = client.jobs.submit(tasks=[SubmitTask.from_dict(task())]).run_id
    workspace.tokens.clear()
    with pytest.raises(PermissionDenied, match="Invalid access token"):
        client.jobs.get_run(run_id)
    workspace.tokens = {"dapi-new"}
    assert workspace.connection["password"] == "dapi-new"
    with Asking(workspace, token="dapi-new") as asking:
        workspace.advance(3600)
        assert asking.run(run_id)["state"]["result_state"] == "SUCCESS"


def test_an_unknown_endpoint(workspace: FakeWorkspace, asking: Asking) -> None:
    for method, path in (("GET", "2.2/jobs/runs/repair"), ("DELETE", "2.2/jobs/runs/submit"), ("GET", "2.0/fs/files")):
        response = asking.http.request(method, path)
        assert (response.status_code, response.json()["error_code"]) == (404, "ENDPOINT_NOT_FOUND")


def test_every_request_is_kept_with_its_arguments(workspace: FakeWorkspace, asking: Asking) -> None:
    run_id = asking.submit()
    asking.run(run_id)
    asking.http.request("GET", "2.2/jobs/runs/get", json={"run_id": run_id})  # as the Databricks provider's trigger
    in_query, in_body = workspace.requests_for(GET)
    assert in_query.arguments == in_query.query == {"run_id": str(run_id)}
    assert (in_body.arguments, in_body.query) == ({"run_id": run_id}, {})
    assert [request.method for request in workspace.requests] == ["POST", "GET", "GET"]
    assert {request.version for request in workspace.requests} == {"2.2"}


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_stopping_leaves_no_thread_and_no_socket() -> None:
    gc.collect()  # what other tests left
    open_before = psutil.Process().num_fds()
    with FakeWorkspace() as workspace:
        port = workspace.port
        asking = Asking(workspace)  # its connection stays open
        asking.submit()
        assert "fake-workspace" in threads()
    assert "fake-workspace" not in threads()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    with asking, pytest.raises(httpx.TransportError):
        asking.submit()
    assert psutil.Process().num_fds() == open_before


def test_it_stops_with_an_answer_outstanding() -> None:
    problems: list[Exception] = []

    def ask(workspace: FakeWorkspace) -> None:
        with Asking(workspace) as asking:
            try:
                asking.submit()
            except httpx.TransportError as error:
                problems.append(error)

    with FakeWorkspace() as workspace:
        workspace.fault(late(600))
        asker = threading.Thread(target=ask, args=[workspace])
        asker.start()
        while not workspace.requests:
            asker.join(0.01)
    asker.join(10)
    assert len(problems) == 1


def test_it_starts_again_where_it_was() -> None:
    workspace = FakeWorkspace()
    with workspace, Asking(workspace) as asking:
        run_id = asking.submit()
    with workspace, Asking(workspace) as asking:
        assert asking.run(run_id)["run_id"] == run_id


def test_a_port_that_is_taken(workspace: FakeWorkspace) -> None:
    other = FakeWorkspace()
    with pytest.raises(OSError, match="in use"):
        other.start(workspace.port)
    with other:
        assert other.port != workspace.port


def test_it_is_started_once(workspace: FakeWorkspace) -> None:
    with pytest.raises(RuntimeError, match="running already"):
        workspace.start()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_all_requests_goes_wrong_in_every_way(share: float) -> None:
    def drawn() -> tuple[list[Fault | None], RandomFaults]:
        faults = RandomFaults(share, chance=random.Random(1))
        return [faults.take("GET", GET) for _ in range(2000)], faults

    found, faults = drawn()
    wrong = [fault for fault in found if fault is not None]
    assert len(wrong) == sum(faults.taken.values()) == pytest.approx(2000 * share, rel=0.1)
    assert set(faults.taken) == (set(every_kind()) if share else set())
    assert all(fault in every_kind().values() for fault in wrong)
    assert drawn()[0] == found


def test_planned_faults_come_first() -> None:
    faults = RandomFaults(1.0, kinds={"503": server_error()})
    faults.plan(lost_request(), path=SUBMIT)
    assert [faults.take("POST", SUBMIT) for _ in range(2)] == [lost_request(), server_error()]
    assert faults.taken == {"503": 1}
