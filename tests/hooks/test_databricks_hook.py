"""Requests to a workspace that survive what the Databricks provider's hook does not."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from deepspeed_provider.backends.base import BackendUnavailable
from deepspeed_provider.backends.workspace_wire import WireRefused
from deepspeed_provider.hooks.databricks import ATTEMPTS, LONGEST_PAUSE_SECONDS, DatabricksWorkspaceHook
from deepspeed_provider.testing import faults
from deepspeed_provider.testing.workspace import FakeWorkspace

FILE = "/Volumes/main/default/files/a folder/x.bin"
ME = "2.0/preview/scim/v2/Me"


@pytest.fixture
def workspace(monkeypatch):
    with FakeWorkspace() as found:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", found.connection_json)
        yield found


@pytest.fixture
def pauses():
    return []


@pytest.fixture(params=["worker", "event loop"])
def get(request, workspace, pauses):
    """One GET, as a worker and as a trigger sends it."""

    async def asleep(seconds):
        pauses.append(seconds)

    hook = DatabricksWorkspaceHook(sleep=pauses.append, asleep=asleep)

    async def aget(path, query):
        async with hook:
            return await hook.aget(path, query)

    if request.param == "worker":
        return lambda path=ME, query=None: hook.get(path, query)
    return lambda path=ME, query=None: asyncio.run(aget(path, query))


def test_arguments_of_a_get_are_in_its_query(workspace, get):
    with pytest.raises(WireRefused) as caught:
        get("2.2/jobs/runs/get", {"run_id": 77})
    assert caught.value.status in (400, 404)
    assert workspace.requests[-1].arguments == {"run_id": "77"}, "numbers of a body would be numbers"


PASSING = {
    "500": (faults.server_error(500), [1.0]),
    "503 that says when": (faults.server_error(503, retry_after_s=7), [7.0]),
    "429 that says when": (faults.too_many_requests(30), [30.0]),
    "429 without a word": (faults.too_many_requests(None), [1.0]),
    "a lock": (faults.could_not_acquire_lock(), [1.0]),
}


@pytest.mark.parametrize(("fault", "waited"), PASSING.values(), ids=PASSING)
def test_what_passes_is_waited_for(workspace, get, pauses, fault, waited):
    workspace.fault(fault, path="preview/*")
    assert get()["active"] is True
    assert pauses == waited


@pytest.mark.parametrize("fault", [faults.lost_request(), faults.lost_response()], ids=["request", "answer"])
def test_a_dropped_connection_is_made_anew(workspace, get, fault):
    """By this hook after a pause, or by the client library at once."""
    workspace.fault(fault, path="preview/*")
    assert get()["active"] is True
    assert [request.status for request in workspace.requests] == [0, 200]


def test_what_does_not_pass_is_no_answer(workspace, get, pauses):
    workspace.fault(faults.server_error(503), path="preview/*", times=100)
    with pytest.raises(BackendUnavailable, match="TEMPORARILY_UNAVAILABLE"):
        get()
    assert len(pauses) == ATTEMPTS - 1
    assert pauses == sorted(pauses), "longer and longer"


def test_more_patience_than_a_call_has_is_left_to_whoever_waits_for_the_run(workspace, get, pauses):
    workspace.fault(faults.too_many_requests(round(LONGEST_PAUSE_SECONDS) + 1), path="preview/*")
    with pytest.raises(BackendUnavailable, match="patience"):
        get()
    assert pauses == []


def test_a_refused_token_is_fetched_anew(workspace, get, monkeypatch):
    assert get()["active"]
    workspace.tokens.clear()
    workspace.tokens.add("dapi-rotated")
    monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", workspace.connection_json)
    assert get()["active"], "the connection has another token now"


def test_a_token_that_stays_refused_is_a_refusal(workspace, get, pauses):
    workspace.tokens.clear()
    workspace.tokens.add("another")
    with pytest.raises(WireRefused) as caught:
        get()
    assert caught.value.status == 403
    assert pauses == []
    assert len(workspace.requests) == 2


def test_a_server_that_is_not_there_is_no_answer(monkeypatch, pauses):
    with FakeWorkspace() as gone:
        connection = gone.connection_json
    monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", connection)
    with pytest.raises(BackendUnavailable):
        DatabricksWorkspaceHook(sleep=pauses.append).get(ME)


def test_files_of_a_volume_are_bytes(workspace):
    hook = DatabricksWorkspaceHook()
    data = bytes(range(256))
    hook.upload(FILE, b"old")
    hook.upload(FILE, data)
    assert hook.download(FILE) == data
    with pytest.raises(WireRefused) as caught:
        hook.download(FILE + ".none")
    assert caught.value.status == 404


def test_an_answer_lost_after_the_write_is_asked_for_again(workspace, pauses):
    """The body of a submission is the same, token included, so that the run stays one."""
    workspace.fault(faults.lost_response(), path="secrets/put")
    hook = DatabricksWorkspaceHook(sleep=pauses.append)
    hook.post("2.0/secrets/scopes/create", {"scope": "s"})
    hook.post("2.0/secrets/put", {"scope": "s", "key": "k", "string_value": "v"})
    assert [request.status for request in workspace.requests_for("secrets/put")] == [0, 200]


def test_neither_token_nor_payload_is_logged(workspace, caplog):
    with caplog.at_level(logging.DEBUG):
        hook = DatabricksWorkspaceHook()
        hook.post("2.0/secrets/scopes/create", {"scope": "the-secret-scope"})
        hook.upload(FILE, b"the-secret-bytes")
    token = json.loads(workspace.connection_json)["password"]
    for secret in (token, "the-secret-scope", "the-secret-bytes"):
        assert secret not in caplog.text
