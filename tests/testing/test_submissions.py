# SPDX-License-Identifier: Apache-2.0
"""What ``jobs/runs/submit`` promises of tokens, and what it refuses, over plain HTTP."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from deepspeed_provider.testing.endings import fails, stock_out, succeeds
from deepspeed_provider.testing.workspace import FakeWorkspace, behaviour

from testing.asking import CLUSTER, SCRIPT, Asking, body, refusal, task, without

SUBMIT = "2.2/jobs/runs/submit"
AN_HOUR_S = 3600.0


def test_the_same_token_is_the_same_run_whatever_is_submitted_with_it(workspace: FakeWorkspace, asking: Asking) -> None:
    first = asking.submit(idempotency_token="t")
    assert asking.submit(task("another"), idempotency_token="t", run_name="another") == first
    assert asking.post(SUBMIT, {"idempotency_token": "t"}) == {"run_id": first}
    assert asking.submit(idempotency_token="u") != first
    workspace.advance(AN_HOUR_S)
    assert asking.submit(idempotency_token="t") == first
    assert [run.name for run in workspace.runs] == ["Untitled", "Untitled"]


def test_without_a_token_every_request_is_a_run(workspace: FakeWorkspace, asking: Asking) -> None:
    assert len({asking.submit() for _ in range(3)}) == len(workspace.runs) == 3
    assert asking.submit(idempotency_token="") != asking.submit(idempotency_token="")


def test_a_token_that_was_sent_from_many_threads_is_one_run(workspace: FakeWorkspace) -> None:
    together = threading.Barrier(8)

    def submit(_: int) -> int:
        with Asking(workspace) as asking:
            together.wait()
            return asking.submit(idempotency_token="t")

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(submit, range(8)))) == 1
    assert len(workspace.runs) == 1


def test_many_threads_ask_while_time_passes(workspace: FakeWorkspace) -> None:
    """Runs are submitted, looked at, listed and cancelled at once; every answer is whole."""

    def live(number: int) -> str:
        with Asking(workspace) as asking:
            run_id = asking.submit(task(max_retries=3))
            for _ in range(15):
                workspace.advance(60)
                assert asking.run(run_id)["tasks"]
                assert run_id in asking.runs(limit=25)
            asking.cancel(run_id)
            workspace.advance(AN_HOUR_S)
            return str(asking.run(run_id)["status"]["state"])

    workspace.default_behaviour = behaviour(fails("no"), stock_out(), succeeds())
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(live, range(8))) == {"TERMINATED"}


def test_the_token_of_a_deleted_run_is_refused(workspace: FakeWorkspace, asking: Asking) -> None:
    run_id = asking.submit(idempotency_token="t")
    workspace.advance(AN_HOUR_S)
    asking.delete(run_id)
    with pytest.raises(httpx.HTTPStatusError, match="deleted") as error:
        asking.submit(idempotency_token="t")
    assert refusal(error) == (400, "INVALID_PARAMETER_VALUE")


@pytest.mark.parametrize("length", [64, 65])
def test_a_token_has_64_characters_at_most(asking: Asking, length: int) -> None:
    if length <= 64:
        assert asking.submit(idempotency_token="t" * length)
        return
    with pytest.raises(httpx.HTTPStatusError, match="65 characters, more than 64"):
        asking.submit(idempotency_token="t" * length)


def on(**cluster: Any) -> dict[str, Any]:
    return task(new_cluster={**CLUSTER, **cluster})


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        pytest.param({}, "tasks is empty", id="nothing"),
        pytest.param(body(task(""), run_name="x"), "task_key = ''", id="no key"),
        pytest.param(body(task("k" * 101)), "1 to 100 characters", id="a long key"),
        pytest.param(body(task("a"), task("a")), "should be unique", id="a key twice"),
        pytest.param(body(task(depends_on=[{"task_key": "b"}])), "depends on", id="an unknown upstream task"),
        pytest.param(body(task(run_if="ALL_DONE")), "run_if = 'ALL_DONE'", id="a condition that nobody built"),
        pytest.param(body(without("spark_python_task")), "exactly one of ai_runtime_task", id="no work"),
        pytest.param(body(task(sql_task={})), "exactly one of ai_runtime_task", id="work of two kinds"),
        pytest.param(body(task(spark_python_task={})), "python_file is missing", id="no script"),
        pytest.param(
            body(task(spark_python_task={**SCRIPT, "parameters": [1]})), "should be strings, not 1", id="a number"
        ),
        pytest.param(body(without("new_cluster")), "exactly one of new_cluster", id="no cluster"),
        pytest.param(body(task(existing_cluster_id="c")), "exactly one of new_cluster", id="two clusters"),
        pytest.param(
            body({**without("new_cluster"), "existing_cluster_id": "c"}), "c does not exist", id="an unknown cluster"
        ),
        pytest.param(body(on(spark_version="16.4.x-gpu-ml-scala2.13")), "spark_version = '16.4", id="a wrong runtime"),
        pytest.param(body(on(node_type_id="p6.huge")), "node type 'p6.huge'", id="an unknown node type"),
        pytest.param(body(on(driver_node_type_id="p6.huge")), "node type 'p6.huge'", id="an unknown driver"),
        pytest.param(body(on(instance_pool_id="p")), "either node_type_id or instance_pool_id", id="pool and type"),
        pytest.param(body(on(is_single_node=True)), "is_single_node needs kind", id="single node without kind"),
        pytest.param(body(on(use_ml_runtime=True)), "use_ml_runtime needs kind", id="machine learning without kind"),
        pytest.param(body(on(num_workers="many")), "num_workers = 'many'", id="workers that are no number"),
        pytest.param(body(task(max_retries="twice")), "max_retries = 'twice'", id="retries that are no number"),
        pytest.param(body(git_source={"git_url": "https://g"}), "git_provider is missing", id="no git provider"),
        pytest.param(body(idempotency_token=7), "idempotency_token = 7", id="a token that is no string"),
    ],
)
def test_a_wrong_request_is_refused(workspace: FakeWorkspace, asking: Asking, sent: Any, message: str) -> None:
    with pytest.raises(httpx.HTTPStatusError) as error:
        asking.post(SUBMIT, sent)
    assert refusal(error) == (400, "INVALID_PARAMETER_VALUE")
    assert message in error.value.response.json()["message"]
    assert workspace.runs == []


def test_a_cluster_without_workers_is_refused(asking: Asking) -> None:
    cluster = {name: value for name, value in CLUSTER.items() if name != "num_workers"}
    with pytest.raises(httpx.HTTPStatusError, match="num_workers or autoscale"):
        asking.submit(task(new_cluster=cluster))
    assert asking.submit(task(new_cluster={**cluster, "autoscale": {"min_workers": 1, "max_workers": 2}}))
    assert asking.submit(task(new_cluster={**cluster, "kind": "CLASSIC_PREVIEW", "is_single_node": True}))


@pytest.mark.parametrize("data", ["{half", "[]", "7"])
def test_a_body_that_is_no_object_is_refused(asking: Asking, data: str) -> None:
    response = asking.http.post(SUBMIT, content=data, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error_code"]) == (400, "MALFORMED_REQUEST")


def test_the_older_shape_with_one_task_at_the_top(workspace: FakeWorkspace, asking: Asking) -> None:
    run_id = asking.post(
        SUBMIT,
        {"run_name": "old", "spark_python_task": SCRIPT, "new_cluster": CLUSTER, "timeout_seconds": 60},
    )["run_id"]
    [entry] = asking.run(run_id)["tasks"]
    assert entry["spark_python_task"] == SCRIPT
    assert entry["new_cluster"] == CLUSTER
    workspace.advance(AN_HOUR_S)
    assert asking.run(run_id)["state"]["result_state"] == "TIMEDOUT"


def test_numbers_in_quotes_are_numbers(workspace: FakeWorkspace, asking: Asking) -> None:
    run_id = asking.submit(on(num_workers="2") | {"max_retries": "1"}, timeout_seconds="7200")
    [entry] = asking.run(run_id)["tasks"]
    assert (entry["new_cluster"]["num_workers"], entry["max_retries"]) == (2, 1)
    cluster = asking.get("2.1/clusters/get", cluster_id=entry["cluster_instance"]["cluster_id"])
    assert cluster["num_workers"] == 2
    assert workspace.runs[0].body["timeout_seconds"] == 7200
