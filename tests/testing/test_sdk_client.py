# SPDX-License-Identifier: Apache-2.0
"""Every endpoint through the real client of databricks-sdk, and every answer through its classes."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import NotFound
from databricks.sdk.service import compute, files, iam, jobs
from databricks.sdk.service import workspace as workspaces
from deepspeed_provider.testing import endings
from deepspeed_provider.testing.endings import Ending
from deepspeed_provider.testing.timeline import Phase
from deepspeed_provider.testing.workspace import USER, FakeWorkspace

from testing.asking import CLUSTER, SCRIPT, Asking, task

UNKNOWN_STATE = "PREPARING_FOR_SOMETHING_NEW"
VOLUME = "/Volumes/main/default/models"
# What the wire carries and the SDK's classes drop, with who has seen it.
BEYOND_THE_SDK = {
    "node_info.available_core_quota": "Azure/azure-databricks-client, test of list-node-types",
    "node_info.total_core_quota": "Azure/azure-databricks-client, test of list-node-types",
}
ENDINGS = {
    "success": endings.succeeds(logs="step 1\n"),
    "success with failures": endings.succeeds_with_failures(),
    "user code": endings.fails("ValueError: no such column", logs="loading\n"),
    "many ranks": endings.out_of_gpu_memory(rank=3, ranks=8),
    "host kill": endings.host_killed(),
    "library": endings.library_failure(),
    "stock-out": endings.stock_out(),
    "stock-out on Azure": endings.stock_out("CLOUD_PROVIDER_RESOURCE_STOCKOUT"),
    "spot": endings.spot_loss(),
    "platform": endings.internal_error(),
}
UNSCRIPTED = [
    endings.USER_CANCELED,
    endings.TIMED_OUT,
    endings.RUN_LIMIT,
    endings.UPSTREAM_FAILED,
    endings.UPSTREAM_CANCELED,
]


def submit_task(key: str = "train", **more: Any) -> jobs.SubmitTask:
    return jobs.SubmitTask.from_dict(task(key, **more))


def kept(of: Any, answer: Any) -> Any:
    """An answer as it comes through a class of the SDK, which drops what it doesn't know."""
    return of.from_dict(answer).as_dict()


def full(value: Any, name: str = "") -> Any:
    """Without what is empty, which the SDK's classes leave out, and without what they are known not to have."""
    if isinstance(value, dict):
        items = {key: full(each, f"{name.rpartition('.')[2]}.{key}") for key, each in value.items()}
        return {
            key: each
            for key, each in items.items()
            if each not in (None, {}, []) and f"{name.rpartition('.')[2]}.{key}" not in BEYOND_THE_SDK
        }
    return [full(each, name) for each in value] if isinstance(value, list) else value


def enum(of: Any) -> set[str]:
    return {member.value for member in of}


def every_answer(asking: Asking, run_id: int) -> Iterator[tuple[Any, Any]]:
    """All that can be read about a run now, with the class that it has."""
    run = asking.run(run_id)
    yield jobs.Run, run
    for expand in (True, False):
        yield jobs.ListRunsResponse, asking.get("2.2/jobs/runs/list", expand_tasks=expand)
    for each in run["tasks"]:
        yield jobs.Run, asking.run(each["run_id"])
        yield jobs.RunOutput, asking.output(each["run_id"])
        if "cluster_instance" in each:
            cluster_id = each["cluster_instance"]["cluster_id"]
            yield compute.ClusterDetails, asking.get("2.1/clusters/get", cluster_id=cluster_id)
            events = {"cluster_id": cluster_id, "page_size": 2}
            yield compute.GetEventsResponse, asking.post("2.1/clusters/events", events)


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
@pytest.mark.parametrize("cancelled", [False, True], ids=["", "cancelled"])
def test_the_sdk_keeps_every_field_of_every_phase(
    workspace: FakeWorkspace, asking: Asking, ending: Ending, cancelled: bool
) -> None:
    workspace.next_run(ending, endings.succeeds(), queue_s=60, start_s=60, run_s=60, stop_s=90)
    run_id = asking.submit(
        task("prepare", max_retries=1, min_retry_interval_millis=240_000, libraries=[{"pypi": {"package": "peft"}}]),
        task("train", depends_on=[{"task_key": "prepare"}]),
        queue={"enabled": True},
        run_name="fine-tune",
    )
    phases = set()
    for minute in range(16):
        phases.add(workspace.runs[0].course(workspace.clock.now_ms).phase)
        for of, answer in every_answer(asking, run_id):
            assert full(answer) == full(kept(of, answer))
        if cancelled and minute == 3:
            asking.cancel(run_id)
        workspace.advance(60)
    assert phases >= {Phase.QUEUED, Phase.PENDING, Phase.TERMINATING, Phase.ENDED}
    assert asking.run(run_id)["end_time"]


@pytest.mark.parametrize(
    ("of", "path"),
    [
        pytest.param(compute.GetSparkVersionsResponse, "2.1/clusters/spark-versions", id="runtimes"),
        pytest.param(iam.User, "2.0/preview/scim/v2/Me", id="me"),
        pytest.param(workspaces.ListScopesResponse, "2.0/secrets/scopes/list", id="scopes"),
        pytest.param(workspaces.ListSecretsResponse, "2.0/secrets/list?scope=s", id="secrets"),
        pytest.param(workspaces.GetSecretResponse, "2.0/secrets/get?scope=s&key=k", id="secret"),
        pytest.param(workspaces.ObjectInfo, "2.0/workspace/get-status?path=/Shared/f.py", id="status"),
        pytest.param(workspaces.ExportResponse, "2.0/workspace/export?path=/Shared/f.py", id="export"),
        pytest.param(workspaces.ListResponse, "2.0/workspace/list?path=/", id="workspace"),
        pytest.param(files.ListDirectoryResponse, f"2.0/fs/directories{VOLUME}?page_size=1", id="volume"),
    ],
)
def test_the_sdk_keeps_every_field(workspace: FakeWorkspace, asking: Asking, of: Any, path: str) -> None:
    workspace.secrets.scopes["s"] = {"k": "v"}
    workspace.files.write("/Workspace/Shared/f.py", b"print()")
    workspace.files.write(f"{VOLUME}/a", b"1")
    workspace.files.write(f"{VOLUME}/b/c", b"2")
    answer = asking.get(path)
    assert full(answer)
    assert full(answer) == full(kept(of, answer))


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_the_sdk_keeps_every_field_of_a_node_type(cloud: str) -> None:
    with FakeWorkspace(cloud=cloud) as workspace, Asking(workspace) as asking:
        answer = asking.get("2.1/clusters/list-node-types")
    assert len(answer["node_types"]) > 5
    assert full(answer) == full(kept(compute.ListNodeTypesResponse, answer))


@pytest.mark.parametrize("field", BEYOND_THE_SDK)
def test_what_the_sdk_does_not_have_is_there_and_dropped(field: str) -> None:
    with FakeWorkspace(cloud="azure") as workspace, Asking(workspace) as asking:
        answer = asking.get("2.1/clusters/list-node-types")
    outer, inner = field.split(".")
    assert any(inner in entry.get(outer, {}) for entry in answer["node_types"])
    for entry in kept(compute.ListNodeTypesResponse, answer)["node_types"]:
        assert inner not in entry.get(outer, {})


@pytest.mark.parametrize("ending", [*ENDINGS.values(), *UNSCRIPTED], ids=lambda ending: ending.code)
def test_an_ending_is_told_in_the_words_of_the_sdk(ending: Ending) -> None:
    states = enum(jobs.RunLifeCycleState)
    assert {ending.life_cycle_state, ending.task_life_cycle_state} <= states
    assert ending.result_state in {None, *enum(jobs.RunResultState)}
    assert ending.code in enum(jobs.TerminationCodeCode)
    assert ending.type in enum(jobs.TerminationTypeType)
    assert ending.cluster.code in enum(compute.TerminationReasonCode)
    assert ending.cluster.type in enum(compute.TerminationReasonType)
    for kind, details in ending.events:
        assert kind in enum(compute.EventType)
        assert compute.EventDetails.from_dict(dict(details)).as_dict() == details
    assert ending.source


def test_every_ending_of_the_module_is_looked_at() -> None:
    written = {name for name, value in vars(endings).items() if isinstance(value, Ending) and name.isupper()}
    assert {id(getattr(endings, name)) for name in written if not name.startswith("_")} == set(map(id, UNSCRIPTED))


def test_an_unknown_state_is_unknown_to_the_sdk_too(workspace: FakeWorkspace, client: WorkspaceClient) -> None:
    workspace.next_run(running_as=UNKNOWN_STATE, start_s=0)
    run = client.jobs.get_run(client.jobs.submit(tasks=[submit_task()]).run_id)
    assert run.state is not None
    assert UNKNOWN_STATE not in enum(jobs.RunLifeCycleState)
    assert run.state.life_cycle_state is None


def test_a_run_from_submission_to_its_end(workspace: FakeWorkspace, client: WorkspaceClient) -> None:
    workspace.next_run(endings.fails("ValueError: no", logs="loading\n"))
    waiter = client.jobs.submit(run_name="fine-tune", idempotency_token="t", tasks=[submit_task()])
    run = client.jobs.get_run(waiter.run_id)
    assert run.state is not None
    assert run.state.life_cycle_state is jobs.RunLifeCycleState.PENDING
    assert (run.run_name, run.creator_user_name) == ("fine-tune", USER)
    workspace.advance(3600)
    run = client.jobs.get_run(waiter.run_id)
    assert run.state is not None
    assert run.status is not None
    assert run.status.termination_details is not None
    assert run.tasks is not None
    assert run.tasks[0].state is not None
    # A failure of the user's code: databricks/cli testserver, measured.
    assert run.state.life_cycle_state is jobs.RunLifeCycleState.INTERNAL_ERROR
    assert run.tasks[0].state.life_cycle_state is jobs.RunLifeCycleState.TERMINATED
    assert run.status.state is jobs.RunLifecycleStateV2State.TERMINATED
    assert run.status.termination_details.code is jobs.TerminationCodeCode.RUN_EXECUTION_ERROR
    assert "Task train failed" in str(run.state.state_message)
    assert run.tasks[0].run_id is not None
    output = client.jobs.get_run_output(run.tasks[0].run_id)
    assert (output.error, output.logs) == ("ValueError: no", "loading\n")
    assert output.metadata is not None
    assert output.metadata.job_run_id == run.run_id


def test_all_tasks_of_a_long_run(client: WorkspaceClient) -> None:
    names = [f"task-{number}" for number in range(230)]
    run_id = client.jobs.submit(tasks=[submit_task(name) for name in names]).run_id
    run = client.jobs.get_run(run_id)
    assert [each.task_key for each in run.tasks or ()] == names


def test_all_runs_of_a_busy_workspace(workspace: FakeWorkspace, client: WorkspaceClient, asking: Asking) -> None:
    submitted = [asking.submit() for _ in range(60)]
    for limit in (None, 7, 25):
        listed = client.jobs.list_runs(limit=limit, run_type=jobs.RunType.SUBMIT_RUN, active_only=True)
        assert [run.run_id for run in listed] == submitted[::-1]
    assert len(workspace.requests_for("jobs/runs/list")) == 3 + 9 + 3


def test_the_tasks_of_listed_runs(client: WorkspaceClient) -> None:
    client.jobs.submit(tasks=[submit_task(f"task-{number}") for number in range(120)])
    [run] = client.jobs.list_runs(expand_tasks=True)
    assert len(run.tasks or ()) == 120  # the client follows ``has_more``
    [run] = client.jobs.list_runs()
    assert not run.tasks


def test_a_cancel_is_waited_for(workspace: FakeWorkspace, client: WorkspaceClient) -> None:
    workspace.clock.poll_s = 120
    waiter = client.jobs.submit(tasks=[submit_task()])
    run = client.jobs.cancel_run(waiter.run_id).result()
    assert run.state is not None
    assert run.state.result_state is jobs.RunResultState.CANCELED


def test_a_deleted_run_is_gone(workspace: FakeWorkspace, client: WorkspaceClient) -> None:
    run_id = client.jobs.submit(tasks=[submit_task()]).run_id
    workspace.advance(3600)
    client.jobs.delete_run(run_id)
    assert list(client.jobs.list_runs()) == []


def test_a_cluster_and_its_events(workspace: FakeWorkspace, client: WorkspaceClient) -> None:
    workspace.next_run(endings.spot_loss())
    run_id = client.jobs.submit(tasks=[submit_task()]).run_id
    states = []
    for seconds in (0, 300, 550, 60):  # 240 s to start, 600 s to run, 30 s to go
        workspace.advance(seconds)
        run = client.jobs.get_run(run_id)
        assert run.tasks is not None
        assert run.tasks[0].cluster_instance is not None
        cluster_id = str(run.tasks[0].cluster_instance.cluster_id)
        cluster = client.clusters.get(cluster_id)
        states.append(cluster.state)
    assert states == [
        compute.State.PENDING,
        compute.State.RUNNING,
        compute.State.TERMINATING,
        compute.State.TERMINATED,
    ]
    assert cluster.termination_reason is not None
    assert cluster.termination_reason.code is compute.TerminationReasonCode.SPOT_INSTANCE_TERMINATION
    assert cluster.node_type_id == CLUSTER["node_type_id"]
    assert cluster.data_security_mode is compute.DataSecurityMode.SINGLE_USER
    kinds = [event.type.value for event in client.clusters.events(cluster_id, page_size=1) if event.type]
    assert kinds == ["TERMINATING", "NODES_LOST", "RUNNING", "CREATING"]
    oldest = client.clusters.events(cluster_id, order=compute.GetEventsOrder.ASC)
    assert [event.type.value for event in oldest if event.type] == kinds[::-1]


def test_what_the_workspace_offers(workspace: FakeWorkspace, client: WorkspaceClient) -> None:
    offered = client.clusters.list_node_types().node_types or ()
    assert [node.node_type_id for node in offered] == [entry["node_type_id"] for entry in workspace.node_types]
    assert "g5.xlarge" in {node.node_type_id for node in offered}
    versions = client.clusters.spark_versions().versions or ()
    assert CLUSTER["spark_version"] in {version.key for version in versions}
    assert client.current_user.me().user_name == USER


def test_workspace_files(client: WorkspaceClient) -> None:
    folder, content = f"/Users/{USER}/deep/speed", b"print('hello')"
    client.workspace.mkdirs(folder)
    client.workspace.import_(
        f"{folder}/launcher.py",
        content=base64.b64encode(content).decode(),
        format=workspaces.ImportFormat.AUTO,
        overwrite=True,
    )
    assert client.workspace.get_status(f"{folder}/launcher.py").object_type is workspaces.ObjectType.FILE
    exported = client.workspace.export(f"/Workspace{folder}/launcher.py")
    assert base64.b64decode(exported.content or "") == content
    found = {each.path: each.object_type for each in client.workspace.list(f"/Users/{USER}", recursive=True)}
    assert found == {f"{folder}/launcher.py": workspaces.ObjectType.FILE}
    client.workspace.delete(f"/Users/{USER}/deep", recursive=True)
    with pytest.raises(NotFound):
        client.workspace.get_status(folder)


def test_files_in_volumes(client: WorkspaceClient) -> None:
    client.files.create_directory(f"{VOLUME}/run/checkpoints")
    client.files.get_directory_metadata(f"{VOLUME}/run")
    client.files.upload(f"{VOLUME}/run/result.json", io.BytesIO(b"{}"))
    client.files.upload(f"{VOLUME}/run/result.json", io.BytesIO(b'{"loss": 1}'), overwrite=True)
    contents = client.files.download(f"{VOLUME}/run/result.json").contents
    assert contents is not None
    assert contents.read() == b'{"loss": 1}'
    metadata = client.files.get_metadata(f"{VOLUME}/run/result.json")
    assert (metadata.content_length, metadata.last_modified) == (11, "Thu, 01 Jan 2026 00:00:00 GMT")
    listed = {each.name: (each.is_directory, each.file_size) for each in list_all(client, f"{VOLUME}/run")}
    assert listed == {"checkpoints": (True, None), "result.json": (False, 11)}
    client.files.delete(f"{VOLUME}/run/result.json")
    client.files.delete_directory(f"{VOLUME}/run/checkpoints")
    assert list_all(client, f"{VOLUME}/run") == []
    with pytest.raises(NotFound):
        client.files.get_metadata(f"{VOLUME}/run/result.json")


def list_all(client: WorkspaceClient, folder: str) -> list[files.DirectoryEntry]:
    return list(client.files.list_directory_contents(folder, page_size=1))


def test_secrets(client: WorkspaceClient) -> None:
    client.secrets.create_scope("models")
    client.secrets.put_secret("models", "token", string_value="hf_1")
    client.secrets.put_secret("models", "other", bytes_value=base64.b64encode(b"hf_2").decode())
    assert [scope.name for scope in client.secrets.list_scopes()] == ["models"]
    assert [secret.key for secret in client.secrets.list_secrets("models")] == ["other", "token"]
    assert base64.b64decode(client.secrets.get_secret("models", "other").value or "") == b"hf_2"
    client.secrets.delete_secret("models", "other")
    client.secrets.delete_scope("models")
    assert list(client.secrets.list_scopes()) == []


def test_a_task_travels_through_the_sdk_unchanged(workspace: FakeWorkspace, client: WorkspaceClient) -> None:
    client.jobs.submit(tasks=[submit_task()])
    assert workspace.runs[0].task("train")["spark_python_task"] == SCRIPT
