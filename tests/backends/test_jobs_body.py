"""The body of ``runs/submit``: what is ours, what is the user's, and where they meet."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from databricks.sdk.service.compute import ClusterSpec
from databricks.sdk.service.jobs import JobsAPI, SubmitTask
from deepspeed_provider.backends.base import RunRequest
from deepspeed_provider.backends.jobs_body import JobSettings, job_settings, name_mark, submit_body
from deepspeed_provider.backends.jobs_fields import OF_CLUSTER, OF_RUN, OF_TASK
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


def test_without_a_timeout_of_the_operators_the_platforms_limit_is_the_users():
    given = job_settings({"code_folder": FOLDER, "run_fields": {"timeout_seconds": 7200}})
    assert body_of(run_fields=given.run_fields)["timeout_seconds"] == 7200


def test_with_one_the_users_limit_may_only_agree():
    assert body_of(timeout_s=3600.0, run_fields={"timeout_seconds": 4500})["timeout_seconds"] == 4500
    with pytest.raises(SpecError, match=r"job\.run_fields\.timeout_seconds = 7200: contradicts what was planned, 4500"):
        body_of(timeout_s=3600.0, run_fields={"timeout_seconds": 7200})


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
        body_of(run_fields={"queue": {"enabled": False}}, cluster_fields={"num_workers": 4})
    text = str(caught.value)
    assert "job.run_fields.queue.enabled = False: contradicts what was planned, True" in text
    assert "job.cluster_fields.num_workers = 4: contradicts what was planned, 0" in text


HIDDEN = "= '(hidden)': looks like a credential"
REFUSED = {
    "a setting": ({"clustr": {}}, "job.clustr = {}: is no setting of a job. Did you mean 'cluster'?"),
    "a list for a mapping": ({"run_fields": [1]}, "job.run_fields = [1]: is no mapping"),
    "a number for a folder": ({"code_folder": 5}, "job.code_folder = 5: is no text"),
    "a word for a switch": ({"queue": "no"}, "job.queue = 'no': is no yes or no. Give true or false."),
    "a word for libraries": ({"libraries": "peft"}, "job.libraries = 'peft': is no list of libraries"),
    "words for libraries": ({"libraries": ["peft"]}, "job.libraries = ['peft']: is no list of libraries"),
    "a token": ({"run_fields": {"idempotency_token": "x"}}, "job.run_fields.idempotency_token = 'x': is set here"),
    "tasks": ({"run_fields": {"tasks": []}}, "job.run_fields.tasks = []: is set here"),
    "retries": ({"task_fields": {"max_retries": 2}}, "job.task_fields.max_retries = 2: is set here"),
    "a letter that is missing": (
        {"cluster_fields": {"num_wrkers": 3}},
        "job.cluster_fields.num_wrkers = 3: is no field of the API. Did you mean 'num_workers'?",
    ),
    "letters that are swapped": ({"run_fields": {"budget_polciy_id": "b"}}, "Did you mean 'budget_policy_id'?"),
    "two clusters": ({"cluster": CLUSTER, "existing_cluster_id": "c"}, "job.existing_cluster_id = 'c': cluster is"),
    "a password of an index": (
        {"libraries": [{"pypi": {"package": "a", "repo": "https://u:pw@example.com/simple"}}]},
        f"job.libraries[0].pypi.repo {HIDDEN}",
    ),
    "a tag": ({"cluster_fields": {"custom_tags": {"api_token": "x"}}}, f"custom_tags.api_token {HIDDEN}"),
    "a password of Git": (
        {"run_fields": {"git_source": {"git_url": "https://u:pw@example.com/x"}}},
        f"job.run_fields.git_source.git_url {HIDDEN}",
    ),
}


@pytest.mark.parametrize(("given", "said"), REFUSED.values(), ids=REFUSED)
def test_settings_that_cannot_work_are_refused_by_their_names(given, said):
    with pytest.raises(SpecError) as caught:
        job_settings({"code_folder": FOLDER, **given})
    assert said in str(caught.value)


def test_a_field_of_tomorrow_travels():
    fields = {"carbon_budget": 3}
    assert job_settings({"code_folder": FOLDER, "run_fields": fields}).run_fields == fields


def test_the_fields_are_those_of_the_sdk():
    assert set(inspect.signature(JobsAPI.submit).parameters) - {"self"} == OF_RUN
    assert {each.name for each in dataclasses.fields(SubmitTask)} == OF_TASK
    assert {each.name for each in dataclasses.fields(ClusterSpec)} == OF_CLUSTER


def test_what_is_null_is_not_given():
    assert job_settings({"code_folder": FOLDER, "cluster": None, "queue": None}) == JobSettings(code_folder=FOLDER)


def test_references_to_secrets_are_none():
    variables = {"HF_TOKEN": "{{secrets/training/hub}}"}
    job_settings({"code_folder": FOLDER, "cluster_fields": {"spark_env_vars": variables}})
