# SPDX-License-Identifier: Apache-2.0
"""Secrets stay where they are: planted ones are looked for in everything that a run leaves anywhere."""

from __future__ import annotations

import hashlib
import io
import logging
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred
from deepspeed_provider.backends.jobs_body import job_settings
from deepspeed_provider.credentials import looks_secret
from deepspeed_provider.errors import SpecError
from deepspeed_provider.operators.own_training import DeepSpeedFunctionOperator, DeepSpeedScriptOperator
from deepspeed_provider.testing.executing import ExecutingWorkspace
from deepspeed_provider.testing.workspace import FakeWorkspace
from operators.fake_task import FakeTask

VOLUME = "/Volumes/main/default/runs"
CONNECTION, TRACKING, HUB, SCOPE = (f"planted-{name}-3f9a" for name in ("connection", "tracking", "hub", "scope"))
REFERENCE = "{{secrets/training/hub}}"
RUNTIME = {(3, 11): "15.4.x-gpu-ml-scala2.12", (3, 12): "16.4.x-gpu-ml-scala2.12"}[sys.version_info[:2]]
JOB = {
    "cluster": {"spark_version": RUNTIME, "node_type_id": "g5.xlarge", "num_workers": 0},
    "cluster_fields": {"spark_env_vars": {"HF_TOKEN": REFERENCE}},
}


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def train(variable: str) -> dict[str, str]:
    import hashlib
    import os

    # Not the value itself: what a rank returns is stored.
    return {"seen": hashlib.sha256(os.environ[variable].encode()).hexdigest()}


def planted(workspace: FakeWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace.tokens = {CONNECTION}
    workspace.secrets.create({"scope": "training"})
    workspace.secrets.put({"scope": "training", "key": "hub", "string_value": SCOPE})
    monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", workspace.connection_json)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TRACKING)
    monkeypatch.setenv("HF_TOKEN", HUB)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def unpacked(data: bytes) -> Iterator[str]:
    """The texts in a file, and those in the files of an archive."""
    if not data.startswith(b"PK"):
        yield data.decode(errors="replace")
        return
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            yield archive.read(name).decode(errors="replace")


class Traces:
    """Everything that one task leaves behind, by where it was found."""

    def __init__(self, workspace: FakeWorkspace, kind: type = DeepSpeedFunctionOperator, **options: Any) -> None:
        self.workspace = workspace
        self.task = FakeTask()
        self.context = {**self.task.context(), "ds": "2026-01-01"}
        self.operator = kind(
            task_id="train",
            databricks_conn_id="databricks_default",
            base_uri=VOLUME,
            job=JOB,
            poll_interval=0.2,
            retries=0,
            **options,
        )
        self.returned: Any = None
        self.trigger: Any = None

    def run(self) -> Any:
        self.operator.render_template_fields(self.context)
        try:
            self.returned = self.operator.execute(self.context)
        except TaskDeferred as deferred:
            self.trigger = deferred.trigger.serialize()
        return self.returned

    def found(self, caplog: pytest.LogCaptureFixture, printed: str) -> dict[str, str]:
        rendered = {name: getattr(self.operator, name) for name in self.operator.template_fields}
        requests = [repr((each.path, each.arguments)) for each in self.workspace.requests]
        bodies = [text for each in self.workspace.requests for text in unpacked(each.data)]
        files = [text for data in self.workspace.files.contents.values() for text in unpacked(data)]
        return {
            "requests": "\n".join([*requests, *bodies]),
            "files": "\n".join(files),
            "rendered fields": repr(rendered),
            "XCom": repr((self.task.xcoms, self.returned)),
            "record": repr(self.task.store.values),
            "trigger": repr(self.trigger),
            "logs": "\n".join([caplog.text, *(repr(vars(record)) for record in caplog.records), printed]),
        }


def leaks(found: dict[str, str]) -> list[tuple[str, str]]:
    secrets = {"connection": CONNECTION, "tracking": TRACKING, "hub": HUB, "scope": SCOPE}
    return [(name, place) for name, secret in secrets.items() for place, text in found.items() if secret in text]


@pytest.mark.parametrize("deferrable", [False, True], ids=["blocking", "deferrable"])
def test_nothing_of_a_run_holds_a_secret(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    deferrable: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    with FakeWorkspace(poll_s=0 if deferrable else 3600) as workspace:
        planted(workspace, monkeypatch)
        traces = Traces(workspace, function=train, arguments={"variable": "HF_TOKEN"}, deferrable=deferrable)
        traces.run()
        found = traces.found(caplog, "".join(capfd.readouterr()))
        assert leaks(found) == []
        assert [place for place in ("requests", "files", "record", "logs") if not found[place]] == []
        assert (traces.trigger is not None) == deferrable
        body = workspace.requests_for("jobs/runs/submit")[0].arguments
        assert body["tasks"][0]["new_cluster"]["spark_env_vars"] == {"HF_TOKEN": REFERENCE}, "as it was written"


def test_the_search_finds_what_is_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A secret under a name that tells nothing, in a shape that nobody knows, cannot be refused."""
    with FakeWorkspace(poll_s=3600) as workspace:
        planted(workspace, monkeypatch)
        traces = Traces(workspace, function=train, arguments={"variable": "X"}, environment={"X": HUB})
        traces.run()
        found = leaks(traces.found(caplog, ""))
        assert found == [("hub", "requests"), ("hub", "files"), ("hub", "rendered fields")]


@pytest.mark.slow
def test_a_rank_sees_the_scopes_secret_and_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.DEBUG)
    with ExecutingWorkspace(tmp_path) as workspace:
        planted(workspace, monkeypatch)
        traces = Traces(workspace, function=train, arguments={"variable": "HF_TOKEN"}, use_gpu=False)
        assert traces.run()["seen"] == digest_of(SCOPE), "the cluster's, not the worker's"
        found = traces.found(caplog, "".join(capfd.readouterr()))
        outputs = [path.read_text() for path in tmp_path.glob("programs/*/output.log")]
        assert leaks({**found, "output": "\n".join(outputs)}) == []
        assert outputs


def test_a_failure_holds_no_secret(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The error of a task is logged and mailed."""
    caplog.set_level(logging.DEBUG)
    with FakeWorkspace() as workspace:
        planted(workspace, monkeypatch)
        traces = Traces(workspace, function=train, arguments={"variable": "HF_TOKEN"})
        traces.operator.job = {**JOB, "cluster": {**JOB["cluster"], "spark_version": "14.3.x-gpu-ml-scala2.12"}}
        with pytest.raises(AirflowFailException) as caught:
            traces.run()
        assert leaks({"error": str(caught.value), **traces.found(caplog, "")}) == []


LIKE_A_SECRET = {
    "a Databricks token": ("X", "dapi" + "0123456789abcdef" * 2),
    "a hub token": ("X", "hf_" + "a1B2" * 8),
    "a GitHub token": ("X", "ghp_" + "a1B2" * 9),
    "an AWS key": ("X", "AKIA" + "ABCD" * 4),
    "a password in an address": ("X", "https://me:pass@mlflow.example.com"),
    "a private key": ("X", "-----BEGIN RSA PRIVATE KEY-----"),
    "a name": ("HF_TOKEN", "anything"),
    "a name of Azure's": ("AZURE_CLIENT_SECRET", "anything"),
    "a name in Spark's settings": ("fs.azure.account.key", "anything"),
}
UNSUSPICIOUS = {
    "a reference": ("HF_TOKEN", REFERENCE),
    "an address": ("MLFLOW_TRACKING_URI", "https://mlflow.example.com:5000/path"),
    "a switch": ("TOKENIZERS_PARALLELISM", "false"),
    "a number": ("MAX_TOKEN", 128),
    "nothing": ("HF_TOKEN", ""),
    "a path": ("HF_TOKEN_PATH", "/Volumes/main/default/x"),
}


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        *(pytest.param(*given, True, id=case) for case, given in LIKE_A_SECRET.items()),
        *(pytest.param(*given, False, id=case) for case, given in UNSUSPICIOUS.items()),
    ],
)
def test_what_is_taken_for_a_credential(name: str, value: Any, secret: bool) -> None:
    assert looks_secret(name, value) is secret


GIVEN = "hf_" + "a1B2" * 8


@pytest.mark.parametrize(
    ("options", "field"),
    [
        pytest.param({"environment": {"HF_TOKEN": GIVEN}}, "environment.HF_TOKEN", id="environment"),
        pytest.param({"arguments": ["--hf_token", "mine"]}, "arguments[1]", id="after a flag"),
        pytest.param({"arguments": ["--hf_token=mine"]}, "arguments[0]", id="in a flag"),
        pytest.param({"arguments": [GIVEN]}, "arguments[0]", id="by its shape"),
        pytest.param(
            {"job": {**JOB, "cluster_fields": {"spark_env_vars": {"HF_TOKEN": GIVEN}}}},
            "job.cluster_fields.spark_env_vars.HF_TOKEN",
            id="cluster's variables",
        ),
    ],
)
def test_credentials_that_a_user_writes_down_are_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    with FakeWorkspace() as workspace:
        planted(workspace, monkeypatch)
        traces = Traces(workspace, DeepSpeedScriptOperator, script=str(script))
        for name, value in options.items():
            setattr(traces.operator, name, value)
        with pytest.raises(AirflowFailException) as caught:
            traces.operator.execute(traces.context)
        assert f"{field} = '(hidden)': looks like a credential" in str(caught.value)
        assert "{{secrets/SCOPE/KEY}}" in str(caught.value)
        assert GIVEN not in str(caught.value)
        assert workspace.requests == []


def test_a_functions_arguments_are_looked_through() -> None:
    operator = DeepSpeedFunctionOperator(task_id="t", function=train, arguments={"hub": {"token": GIVEN}})
    with pytest.raises(SpecError) as caught:
        operator.build_request("", "out", None)
    assert "arguments.hub = '(hidden)'" in str(caught.value)


def test_references_are_settings_like_any_other() -> None:
    settings = job_settings({"code_folder": VOLUME, **JOB})
    assert settings.cluster_fields == {"spark_env_vars": {"HF_TOKEN": REFERENCE}}


@pytest.mark.parametrize("text", ["{{ ds }} {{secrets/a/b}}", "{{secrets/a-b/c.d}}", "x{{ ds }}"])
def test_only_references_are_kept_from_being_rendered(text: str) -> None:
    operator = DeepSpeedFunctionOperator(task_id="t", function=train, job={"cluster": {"x": text}})
    operator.render_template_fields({"ds": "2026-01-01"})
    assert operator.job == {"cluster": {"x": text.replace("{{ ds }}", "2026-01-01")}}
