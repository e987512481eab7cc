# SPDX-License-Identifier: Apache-2.0
"""The body ``new_cluster`` of every shape, against files, and against the API's own description."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
from databricks.sdk.service import compute
from deepspeed_provider.clusters.candidate import Candidate, candidate
from deepspeed_provider.clusters.cluster_body import (
    LIBAIO_SCRIPT,
    ClusterSettings,
    RunIdentity,
    cluster_body,
    needs_libaio,
    run_tags,
)
from deepspeed_provider.clusters.job import Job
from deepspeed_provider.clusters.node_types import Cloud, node_types
from deepspeed_provider.clusters.runtimes import default_runtime, runtime, runtimes
from deepspeed_provider.clusters.settings import Layout
from deepspeed_provider.errors import SpecError
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import Attention, Offload, OffloadDevice, TrainingOptions

SNAPSHOTS = Path(__file__).parent / "snapshots"
LLAMA = architecture(model_config("llama-2-7b-hf"))


def way(name: str, nodes: int = 1, *, spot: bool = False, nvme: bool = False, flash: bool = False) -> Candidate:
    options = TrainingOptions(attention=Attention.FLASH if flash else Attention.SDPA)
    layout = Layout(
        zero_stage=3,
        offload=Offload.ALL if nvme else Offload.NONE,
        offload_device=OffloadDevice.NVME if nvme else OffloadDevice.CPU,
        gradient_checkpointing=True,
    )
    node_type = next(node for node in node_types() if node.named(name))
    job = Job(architecture=LLAMA, options=options, tokens=10**6, effective_batch_size=64)
    return candidate(job, node_type, nodes, layout, 1, spot=spot)


EVERYTHING = ClusterSettings(
    spark_version="16.4.x-gpu-ml-scala2.12",
    single_user_name="trainer@example.com",
    log_volume="/Volumes/main/ml/logs/finetune",
    model_cache_volume="/Volumes/main/ml/models",
    script_folder="/Volumes/main/ml/scripts",
    policy_id="policy-1",
    tags=run_tags(
        Cloud.AWS, RunIdentity(dag_id="finetune", run_id="manual__2026-11-30T10:00:00+00:00", task_id="train")
    ),
)
SHAPES = {
    "aws_one_node": (way("g6e.12xlarge"), None),
    "aws_several_nodes": (way("p4d.24xlarge", 2), None),
    "aws_spot_one_node": (way("g6e.12xlarge", spot=True), None),
    "aws_spot_several_nodes": (way("g6e.12xlarge", 4, spot=True), None),
    "aws_without_disk": (way("p3.16xlarge", 2), None),
    "aws_nvme": (way("p4d.24xlarge", nvme=True), None),
    "aws_everything": (way("p4de.24xlarge", 2, nvme=True), EVERYTHING),
    "aws_pool": (
        way("p4d.24xlarge", 2),
        ClusterSettings(instance_pool_id="pool-gpu", driver_instance_pool_id="pool-driver", policy_id="policy-1"),
    ),
    "aws_pool_one_node": (way("g6e.12xlarge"), ClusterSettings(instance_pool_id="pool-gpu")),
    "aws_pool_nvme": (way("p4d.24xlarge", nvme=True), ClusterSettings(instance_pool_id="pool-gpu")),
    "aws_flash": (way("g6e.12xlarge", flash=True), None),
    "azure_one_node": (way("Standard_NC96ads_A100_v4"), None),
    "azure_several_nodes": (way("Standard_ND96asr_v4", 2), None),
    "azure_spot": (way("Standard_ND96asr_v4", 2, spot=True), None),
    "gcp_one_node": (way("a2-highgpu-8g"), None),
    "gcp_several_nodes": (way("a2-ultragpu-8g", 4), None),
    "gcp_spot": (way("a2-highgpu-4g", spot=True), None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name):
    body = cluster_body(*SHAPES[name])
    file = SNAPSHOTS / f"{name}.json"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")
    assert body == json.loads(file.read_text())


def test_no_snapshot_is_left_over():
    assert {file.stem for file in SNAPSHOTS.glob("*.json")} == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_the_api_knows_every_field(name):
    """Databricks' own classes drop what they do not know, and refuse values outside their enumerations."""
    body = cluster_body(*SHAPES[name])
    assert compute.ClusterSpec.from_dict(body).as_dict() == body


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("cloud", Cloud)
def test_what_holds_for_every_node_type(cloud, nodes):
    for node_type in node_types():
        if node_type.cloud is not cloud or 64 % (nodes * node_type.gpus):
            continue
        body = cluster_body(way(node_type.node_type_id, nodes))
        assert "-gpu-ml-" in body["spark_version"]
        assert body["runtime_engine"] == "STANDARD"
        assert body["data_security_mode"] == "SINGLE_USER"
        assert "autoscale" not in body
        attributes = [name for name in body if name.endswith("_attributes")]
        assert attributes == [f"{cloud}_attributes"]
        if nodes == 1:
            assert body["num_workers"] == 0
            assert body["custom_tags"]["ResourceClass"] == "SingleNode"
            assert "spark.task.resource.gpu.amount" not in body["spark_conf"]
        else:
            amount = int(body["spark_conf"]["spark.task.resource.gpu.amount"])
            assert body["num_workers"] == nodes == nodes * node_type.gpus // amount, "one barrier task for each node"
            assert "spark.master" not in body["spark_conf"]
        if cloud is Cloud.AWS:
            assert ("ebs_volume_count" in body["aws_attributes"]) == (node_type.nvme_bytes == 0)
            assert body["aws_attributes"]["availability"] == "ON_DEMAND", "the server's default would be spot"


@pytest.mark.parametrize("parameters", [10**8, 7 * 10**9, 4 * 10**11, 10**13])
def test_volumes_keep_within_their_bounds(parameters):
    found = way("p3.16xlarge")
    body = cluster_body(
        dataclasses.replace(found, architecture=dataclasses.replace(LLAMA, vocab_size=parameters // 8192))
    )
    attributes = body["aws_attributes"]
    assert 1 <= attributes["ebs_volume_count"] <= 10
    assert 100 <= attributes["ebs_volume_size"] <= 4096


def test_the_script_is_a_shell_script(tmp_path):
    assert needs_libaio(way("p4d.24xlarge", nvme=True))
    assert not needs_libaio(way("p4d.24xlarge"))
    file = tmp_path / "script.sh"
    file.write_text(LIBAIO_SCRIPT)
    subprocess.run(["bash", "-n", file], check=True)


@pytest.mark.parametrize(
    ("cloud", "run_tag"),
    [
        (Cloud.AWS, "manual__2026-11-30T10:00:00+00:00"),
        (Cloud.AZURE, "manual__2026-11-30T10:00:00+00:00"),
        (Cloud.GCP, "manual__2026-11-30t10-00-00-00-00"),
    ],
)
def test_tags_are_written_as_the_cloud_takes_them(cloud, run_tag):
    found = run_tags(
        cloud, RunIdentity(dag_id="fine<tune>", run_id="manual__2026-11-30T10:00:00+00:00", task_id="t" * 300)
    )
    assert found["airflow_run_id"] == run_tag
    assert found["airflow_dag_id"] == "fine-tune-"
    assert len(found["airflow_task_id"]) == (63 if cloud is Cloud.GCP else 256)


WRONG = {
    "no volume": ({"log_volume": "/dbfs/logs"}, "log_volume"),
    "half a volume": ({"model_cache_volume": "/Volumes/main/ml"}, "model_cache_volume"),
    "scripts elsewhere": ({"script_folder": "dbfs:/scripts"}, "script_folder"),
    "half a pool": ({"driver_instance_pool_id": "pool"}, "driver_instance_pool_id"),
    "tags": ({"tags": {str(number): "" for number in range(45)}}, "tags"),
    "runtime": ({"spark_version": "17.3.x-scala2.13"}, "spark_version"),
    "a runtime without DeepSpeed": ({"spark_version": "13.3.x-gpu-ml-scala2.12"}, "spark_version"),
}


@pytest.mark.parametrize(("values", "field"), WRONG.values(), ids=WRONG)
def test_settings_that_cannot_work(values, field):
    with pytest.raises(SpecError) as error:
        ClusterSettings(**values)
    assert [problem.field for problem in error.value.problems] == [field]
    assert error.value.problems[0].suggestion


def test_all_problems_at_once():
    with pytest.raises(SpecError) as error:
        ClusterSettings(log_volume="logs", script_folder="x", spark_version="9")
    assert {problem.field for problem in error.value.problems} == {"log_volume", "script_folder", "spark_version"}


class TestRuntimes:
    def test_the_default_is_supported_for_long(self):
        assert default_runtime().spark_version == "17.3.x-gpu-ml-scala2.13"

    def test_flash_attention_is_built_for_the_torch_that_is_there(self):
        found = default_runtime(Attention.FLASH)
        assert (found.spark_version, found.torch) == ("16.4.x-gpu-ml-scala2.12", "2.6.0")

    @pytest.mark.parametrize("found", runtimes(), ids=lambda found: found.spark_version)
    def test_every_row(self, found):
        assert "-gpu-ml-" in found.spark_version
        assert found.spark_version.endswith("2.13" if found.spark.startswith("4") else "2.12")
        assert found.has_distributor == (found.spark >= "3.5")
        assert found.source
        assert found.date == "2025-12-09"
        if found.has_distributor:
            assert runtime(found.spark_version) == found

    def test_the_nearest_is_named(self):
        with pytest.raises(SpecError, match=r"17\.3\.x-gpu-ml-scala2\.13"):
            runtime("17.3.x-gpu-ml-scala2.12")
