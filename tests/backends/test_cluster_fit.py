"""Clusters that cannot serve a run are told before anything is submitted."""

from __future__ import annotations

import dataclasses

import pytest
from deepspeed_provider.backends.base import BackendUnavailable, RunIdentity, RunRequest
from deepspeed_provider.backends.cluster_fit import require_fit
from deepspeed_provider.backends.databricks_jobs import DatabricksJobsBackend
from deepspeed_provider.backends.jobs_body import JobSettings
from deepspeed_provider.backends.workspace_wire import WireRefused
from deepspeed_provider.errors import SpecError
from deepspeed_provider.hooks.databricks import DatabricksWorkspaceHook

FOLDER = "/Volumes/main/default/files"
REQUEST = RunRequest(entry="m:f", payload={}, code=(), output_uri=f"{FOLDER}/run")
ML_16 = "16.4.x-gpu-ml-scala2.12"  # Python 3.12
EXISTING = JobSettings(code_folder=FOLDER, existing_cluster_id="c-1")
NEW = JobSettings(code_folder=FOLDER, cluster={"spark_version": ML_16})
G5 = {"spark_version": ML_16, "node_type_id": "g5.xlarge", "num_workers": 0}


def new(**changes):
    return JobSettings(code_folder=FOLDER, cluster={**G5, **changes})


def gone(_):
    raise WireRefused(400, "INVALID_PARAMETER_VALUE", "Cluster c-1 does not exist")


def forbidden(_):
    raise WireRefused(403, "PERMISSION_DENIED", "not yours")


@pytest.mark.parametrize(
    ("settings", "look", "asked", "words"),
    [
        pytest.param(EXISTING, gone, {}, ["= 'c-1': cannot be used", "does not exist"], id="unknown"),
        pytest.param(EXISTING, forbidden, {}, ["PERMISSION_DENIED: not yours"], id="forbidden"),
        pytest.param(
            EXISTING,
            {"state": "TERMINATED", "termination_reason": {"code": "INACTIVITY"}, "spark_version": "x"},
            {},
            ["is TERMINATED (INACTIVITY)", "Start it first"],
            id="ended",
        ),
        pytest.param(EXISTING, {"state": "ERROR"}, {}, ["is ERROR"], id="broken"),
        pytest.param(
            EXISTING,
            {"state": "RUNNING", "spark_version": "16.4.x-scala2.12"},
            {},
            ["has the runtime 16.4.x-scala2.12", "17.3.x-gpu-ml-scala2.13"],
            id="no runtime for machine learning",
        ),
        pytest.param(
            EXISTING,
            {"state": "RUNNING", "spark_version": "16.4.x-cpu-ml-scala2.12"},
            {},
            ["GPU runtime for machine learning"],
            id="no GPU runtime",
        ),
        pytest.param(
            EXISTING,
            {"state": "RUNNING", "spark_version": ML_16},
            {"python": "3.11"},
            ["job.existing_cluster_id", "has Python 3.12", "by Python 3.11", "15.4.x-gpu-ml-scala2.12"],
            id="another Python there",
        ),
        pytest.param(
            EXISTING,
            {"state": "RUNNING", "spark_version": ML_16, "node_type_id": "g5.xlarge", "num_workers": 2},
            {"nodes": 4, "gpus_per_node": 4},
            ["has 2 workers, and nodes = 4 train", "has 1 GPUs on each g5.xlarge, and 4 ranks", "2 problems"],
            id="too small a one that is there",
        ),
        pytest.param(
            EXISTING,
            {"state": "RUNNING", "node_type_id": "g5.12xlarge", "driver_node_type_id": "g5.xlarge", "num_workers": 2},
            {"gpus_per_node": 4},
            ["has 1 GPUs on each g5.xlarge, and 4 ranks are to run on each node"],
            id="a driver that is too small to train alone",
        ),
        pytest.param(NEW, gone, {"python": "3.10"}, ["job.cluster.spark_version", "14.3.x-gpu-ml-scala2.12"], id="new"),
        pytest.param(NEW, gone, {"python": "3.14"}, ["use its Python here"], id="no runtime has it"),
        pytest.param(
            new(spark_version="17.3.x-cpu-ml-scala2.13"),
            gone,
            {},
            ["job.cluster.spark_version = '17.3.x-cpu-ml-scala2.13': is no GPU runtime"],
            id="a new one without GPUs",
        ),
        pytest.param(
            new(num_workers=2),
            gone,
            {},
            ["job.cluster.num_workers = 2: does not go with nodes = 1, which is no workers. Give 0"],
            id="workers that would idle",
        ),
        pytest.param(new(), gone, {"nodes": 2}, ["num_workers = 0", "Give 2"], id="no workers for two nodes"),
        pytest.param(
            new(),
            gone,
            {"gpus_per_node": 4},
            ["job.cluster.node_type_id = 'g5.xlarge': has 1 GPUs, and 4 ranks"],
            id="too few GPUs",
        ),
    ],
)
def test_what_does_not_fit_is_told_in_one_message(settings, look, asked, words):
    with pytest.raises(SpecError) as caught:
        require_fit(dataclasses.replace(REQUEST, **asked), settings, look if callable(look) else lambda _: look)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("settings", "cluster", "asked"),
    [
        pytest.param(EXISTING, {"state": "RUNNING", "spark_version": ML_16}, {"python": "3.12"}, id="it fits"),
        pytest.param(new(node_type_id="g5.12xlarge"), gone, {"gpus_per_node": 4}, id="as many GPUs as ranks"),
        pytest.param(new(node_type_id="of.tomorrow"), gone, {"gpus_per_node": 4}, id="a node type that is not known"),
        pytest.param(new(num_workers=2), gone, {"nodes": 2}, id="two nodes"),
        pytest.param(
            new(spark_version="16.4.x-scala2.12", docker_image={"url": "mine/deepspeed"}),
            gone,
            {},
            id="an image of one's own",
        ),
        pytest.param(new(num_workers=8), gone, {"use_gpu": False, "on_driver": True}, id="Spark has workers"),
        pytest.param(EXISTING, {"state": "RESIZING", "spark_version": ML_16}, {}, id="a state that passes"),
        pytest.param(EXISTING, {"state": "RUNNING"}, {"python": "3.12"}, id="a runtime that is not told"),
        pytest.param(
            EXISTING,
            {
                "state": "RUNNING",
                "node_type_id": "g5.12xlarge",
                "num_workers": 1,
                "autoscale": {"min_workers": 1, "max_workers": 4},
            },
            {"nodes": 3, "gpus_per_node": 2},
            id="one that is larger, or grows",
        ),
        pytest.param(
            EXISTING,
            {"state": "RUNNING", "spark_version": "16.4.x-scala2.12", "use_ml_runtime": True},
            {},
            id="machine learning by a switch",
        ),
        pytest.param(
            EXISTING, {"state": "RUNNING", "spark_version": "16.4.x-scala2.12"}, {"use_gpu": False}, id="CPU: libraries"
        ),
        pytest.param(NEW, {}, {"python": "3.12"}, id="a new one"),
        pytest.param(
            JobSettings(code_folder=FOLDER, cluster={"spark_version": "99.0.x-gpu-ml-scala2.13"}),
            {},
            {"python": "3.11"},
            id="a runtime that nobody here knows",
        ),
    ],
)
def test_what_fits_or_cannot_be_judged_goes_on(settings, cluster, asked):
    require_fit(dataclasses.replace(REQUEST, **asked), settings, lambda _: cluster)


@pytest.fixture
def backend(fake_workspace, databricks_connection):
    return DatabricksJobsBackend(DatabricksWorkspaceHook(databricks_connection, sleep=lambda _: None), EXISTING)


def minted(backend):
    return backend.mint(REQUEST, RunIdentity(key="k", generation=1, digest="d"))


def test_nothing_is_sent_to_a_cluster_that_is_not_there(backend, fake_workspace):
    with pytest.raises(SpecError, match="existing_cluster_id = 'c-1'"):
        backend.submit(REQUEST, minted(backend))
    assert fake_workspace.files.contents == {}
    assert fake_workspace.runs == []


def test_a_run_that_was_sent_is_found_though_its_cluster_has_gone(backend, fake_workspace):
    fake_workspace.clusters.add("c-1")
    sent = backend.submit(REQUEST, minted(backend))
    fake_workspace.clusters.clear()
    assert backend.submit(REQUEST, minted(backend)) == sent, "nothing had been noted of it"


def test_a_workspace_that_does_not_answer_is_no_problem_of_the_request(backend, fake_workspace):
    fake_workspace.stop()
    with pytest.raises(BackendUnavailable):
        backend.submit(REQUEST, minted(backend))
