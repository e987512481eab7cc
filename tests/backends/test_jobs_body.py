"""The body of ``runs/submit``: what is ours, what is the user's, and where they meet."""

from __future__ import annotations

import pytest
from databricks.sdk.service.jobs import SubmitTask
from deepspeed_provider.backends.base import RunRequest
from deepspeed_provider.backends.jobs_body import JobSettings, name_mark, submit_body
from deepspeed_provider.errors import SpecError

TOKEN = "0123456789abcdef" * 2
CLUSTER = {"spark_version": "16.4.x-gpu-ml-scala2.12", "node_type_id": "g5.xlarge", "num_workers": 0}
FOLDER = "/Volumes/main/default/code"


def body_of(name="fine-tune", timeout_s=None, **settings):
    request = RunRequest(entry="m:f", payload={}, code=(), output_uri="/Volumes/x/y/z", name=name, timeout_s=timeout_s)
    chosen = JobSettings(**{"code_folder": FOLDER, "cluster": CLUSTER, **settings})
    return submit_body(request, TOKEN, chosen, script=f"{FOLDER}/launch.py", parameters=["/Volumes/x/y/z/request.json"])


def test_the_task_is_what_the_api_knows_and_never_retried_there():
    task = body_of(libraries=[{"pypi": {"package": "peft==0.15.2"}}])["tasks"][0]
    # An unknown or misspelt key would be gone.
    assert SubmitTask.from_dict(task).as_dict() == task
    assert task["max_retries"] == 0
    assert task["new_cluster"] == CLUSTER
    assert all(isinstance(word, str) for word in task["spark_python_task"]["parameters"])


def test_a_token_and_a_name_that_finds_the_run_again():
    body = body_of(name="n" * 5000)
    assert body["idempotency_token"] == TOKEN
    assert body["run_name"].endswith(name_mark(TOKEN))
    assert len(body["run_name"]) <= 4096
    assert body["queue"] == {"enabled": True}


@pytest.mark.parametrize(("timeout_s", "seconds"), [(None, None), (3600.0, 4500), (0.5, 901)])
def test_the_platform_stops_what_nobody_watches_any_more_and_integers_are_integers(timeout_s, seconds):
    found = body_of(timeout_s=timeout_s).get("timeout_seconds")
    assert found == seconds
    assert found is None or isinstance(found, int)


def test_fields_of_the_users_come_along():
    body = body_of(
        run_fields={"run_as": {"user_name": "a@example.com"}, "budget_policy_id": "b"},
        task_fields={"email_notifications": {"on_failure": ["a@example.com"]}, "timeout_seconds": 60},
        cluster_fields={"custom_tags": {"team": "ml"}, "spark_env_vars": {"A": "1"}},
        cluster={**CLUSTER, "custom_tags": {"dag": "d"}},
    )
    assert body["run_as"] == {"user_name": "a@example.com"}
    assert body["tasks"][0]["timeout_seconds"] == 60
    assert body["tasks"][0]["new_cluster"]["custom_tags"] == {"dag": "d", "team": "ml"}


def test_lists_grow():
    ours = [{"pypi": {"package": "peft"}}]
    theirs = [{"whl": "/Volumes/x/y/z/a.whl"}]
    assert body_of(libraries=ours, task_fields={"libraries": theirs})["tasks"][0]["libraries"] == [*ours, *theirs]


def test_an_existing_cluster_takes_the_place_of_a_new_one():
    task = body_of(existing_cluster_id="c-1")["tasks"][0]
    assert task["existing_cluster_id"] == "c-1"
    assert "new_cluster" not in task


def test_every_contradiction_is_told_at_once():
    with pytest.raises(SpecError) as caught:
        body_of(
            run_fields={"idempotency_token": "mine"},
            task_fields={"max_retries": 3},
            cluster_fields={"num_workers": 4},
        )
    text = str(caught.value)
    assert "run_fields.idempotency_token = 'mine'" in text
    assert "task_fields.max_retries = 3" in text
    assert "cluster_fields.num_workers = 4: contradicts the plan, which has 0" in text
