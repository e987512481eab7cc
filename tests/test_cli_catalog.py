# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider catalog show`` and ``catalog diff``."""

from __future__ import annotations

import json
from functools import partial

import command_line
import pytest
from deepspeed_provider.clusters.gpus import gpu, gpus
from deepspeed_provider.clusters.node_types import Cloud, node_types
from deepspeed_provider.testing import faults
from deepspeed_provider.testing.workspace import FakeWorkspace

run = partial(command_line.run, "catalog", columns=120)
as_json = partial(command_line.as_json, "catalog")


class TestShow:
    def test_all_of_it(self):
        found = as_json("show")["node_types"]
        assert [one["node_type_id"] for one in found] == [node.node_type_id for node in node_types()]
        for one in found:
            assert one["source"]
            assert one["price_date"]
            assert one["region"]

    @pytest.mark.parametrize("cloud", Cloud)
    def test_of_one_cloud(self, cloud):
        wanted = [node.node_type_id for node in node_types() if node.cloud is cloud]
        assert [one["node_type_id"] for one in as_json("show", "--cloud", cloud)["node_types"]] == wanted

    def test_with_one_gpu(self):
        assert {one["gpu"] for one in as_json("show", "--gpu", "a100_80gb")["node_types"]} == {"A100-80GB"}

    @pytest.mark.parametrize("columns", [80, 140])
    def test_for_a_person(self, columns):
        said = run("show", columns=columns).output
        assert all(len(line) <= columns for line in said.splitlines())
        assert "…" not in said
        for node in node_types():
            assert node.node_type_id in said
        assert "aws, us-east-1, prices of 2026-07-20" in said
        line = next(line for line in said.splitlines() if "p4d.24xlarge" in line)
        assert "28.63" in line, "with Databricks' units"
        assert "retired" in next(line for line in said.splitlines() if "p3.2xlarge" in line)

    def test_the_price_follows_the_tier(self):
        def price(*words: str) -> float:
            return as_json("show", *words)["node_types"][0]["usd_per_hour"]

        assert price("--cloud", "aws", "--tier", "enterprise") > price("--cloud", "aws")

    def test_with_rows_of_ones_own(self, tmp_path):
        file = tmp_path / "mine.json"
        file.write_text(json.dumps([{"cloud": "aws", "node_type_id": "p4d.24xlarge", "on_demand_usd_per_hour": 1}]))
        found = {one["node_type_id"]: one for one in as_json("show", "--catalog", str(file))["node_types"]}
        assert found["p4d.24xlarge"]["on_demand_usd_per_hour"] == 1

    def test_the_gpus_instead(self):
        said = as_json("show", "--gpus")
        assert list(said) == ["gpus"]
        found = {one["name"]: one for one in said["gpus"]}
        assert list(found) == [one.name for one in gpus()], "also one that no node type has"
        l4, known = found["L4"], gpu("L4")
        assert (l4["memory_bytes"], l4["compute_capability"], l4["bf16"]) == (known.memory_bytes, "8.9", True)
        assert (l4["dense_flops_16bit"], l4["nvlink_bytes_per_second"]) == (121e12, 0)
        assert l4["memory_bytes_per_second"] == 300e9
        assert (l4["matmul_share"], l4["matmul_source"], l4["date"]) == (0.5, "assumed: 72 W", known.date)

    @pytest.mark.parametrize(
        ("words", "wanted"),
        [
            pytest.param(["--gpu", "h200"], {"H200"}, id="one"),
            pytest.param(["--cloud", "gcp", "--gpu", "t4"], set(), id="one that the cloud has not"),
            pytest.param(
                ["--cloud", "azure"],
                {node.gpu.name for node in node_types() if node.cloud is Cloud.AZURE},
                id="of one cloud",
            ),
        ],
    )
    def test_some_of_the_gpus(self, words, wanted):
        assert {one["name"] for one in as_json("show", "--gpus", *words)["gpus"]} == wanted

    @pytest.mark.parametrize("columns", [80, 140])
    def test_the_gpus_for_a_person(self, columns):
        lines = run("show", "--gpus", columns=columns).output.splitlines()
        assert all(len(line) <= columns for line in lines)
        assert lines[0].strip() == f"GPUs, by data sheets as of {gpu('T4').date}"
        rows = {line.split()[0]: line.split() for line in lines if line.strip()}
        assert {one.name for one in gpus()} <= set(rows)
        assert rows["H200"][1:8] == ["139.7", "9.0", "yes", "989", "4,800", "450", "80%"]
        assert rows["T4"][1:6] == ["14.6", "7.5", "no", "65", "320"]

    def test_all_problems_at_once(self):
        result = run("show", "--cloud", "ibm", "--gpu", "A1000", "--tier", "gold")
        assert result.exit_code == 2
        for text in ("--cloud 'ibm'", "--gpu 'A1000'", "--tier 'gold'"):
            assert text in result.stderr


class TestDiff:
    ENTRIES = (
        {"node_type_id": "p4d.24xlarge", "num_gpus": 8},
        {"node_type_id": "g5.12xlarge", "num_gpus": 4, "is_deprecated": True},
        {"node_type_id": "g5.xlarge", "num_gpus": 2},
        {"node_type_id": "p9.huge", "num_gpus": 8},
        {"node_type_id": "m5.large", "num_gpus": 0},
    )

    @pytest.fixture
    def file(self, tmp_path):
        file = tmp_path / "types.json"
        file.write_text(json.dumps({"node_types": self.ENTRIES}))
        return str(file)

    def test_as_json(self, file):
        said = as_json("diff", file)
        assert said["available"] == ["g5.xlarge", "p4d.24xlarge"]
        assert said["unknown"] == ["p9.huge"]
        missing = {one["node_type_id"]: one["reason"] for one in said["missing"]}
        assert missing["g5.12xlarge"] == "deprecated in this workspace"
        assert missing["p5.48xlarge"] == "not in this workspace"
        assert "Standard_NC4as_T4_v3" not in missing, "it is a workspace on AWS"
        assert said["warnings"] == ["g5.xlarge: this workspace counts 2 GPUs, the catalogue 1"]

    def test_of_a_named_cloud(self, file):
        said = as_json("diff", file, "--cloud", "azure")
        assert said["available"] == []
        assert "Standard_NC4as_T4_v3" in {one["node_type_id"] for one in said["missing"]}

    def test_for_a_person(self, file):
        said = run("diff", file).output
        assert "- p9.huge" in said
        assert "adds one whose GPU `catalog show --gpus` lists" in " ".join(said.split())
        assert "- deprecated in this workspace: g5.12xlarge" in said
        assert "g5.xlarge, p4d.24xlarge" in said

    def test_a_type_is_known_once_it_has_a_row(self, file, tmp_path):
        row = {"cloud": "aws", "node_type_id": "p9.huge", "gpu": "H200", "gpus": 8, "cores": 96, "ram_gib": 2048}
        row |= {"network_gbps": 3200, "dbu_per_hour": 90, "on_demand_usd_per_hour": 60, "region": "us-east-1"}
        mine = tmp_path / "mine.json"
        mine.write_text(json.dumps([row | {"price_date": "2026-11-30"}]))
        said = as_json("diff", file, "--catalog", str(mine))
        assert said["unknown"] == []
        assert "p9.huge" in said["available"]

    def test_nothing_in_common(self, tmp_path):
        file = tmp_path / "types.json"
        file.write_text('{"node_types": []}')
        assert as_json("diff", str(file))["available"] == []
        assert run("diff", str(file)).exit_code == 0

    def test_what_is_wrong(self, tmp_path):
        result = run("diff", str(tmp_path), "--cloud", "ibm")
        assert result.exit_code == 2
        assert f"FILE '{tmp_path}': cannot be read" in result.stderr
        assert "--cloud 'ibm'" in result.stderr


class TestRefresh:
    @pytest.fixture
    def workspace(self, monkeypatch):
        with FakeWorkspace(cloud="azure") as found:
            monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", found.connection_json)
            monkeypatch.setenv("AIRFLOW_CONN_MINE", found.connection_json)
            yield found

    def test_it_is_the_diff_of_what_the_workspace_says_now(self, workspace, tmp_path):
        workspace.node_types[1]["node_info"] = {"available_core_quota": 0, "total_core_quota": 24}
        file = tmp_path / "types.json"
        said = as_json("refresh", "--save", str(file))
        assert said == as_json("diff", str(file))
        (short,) = [one for one in said["missing"] if "quota" in one["reason"]]
        assert short["node_type_id"] == workspace.node_types[1]["node_type_id"]
        assert json.loads(file.read_text()) == {"node_types": workspace.node_types}, "as it came"

    def test_the_answer_that_was_kept_serves_a_plan(self, workspace, tmp_path):
        file = tmp_path / "types.json"
        run("refresh", "--save", str(file))
        words = ["--parameters", "7B", "--method", "lora", "--tokens", "1M", "--workspace-node-types", str(file)]
        assert {one["cloud"] for one in command_line.as_json("plan", *words)["candidates"]} == {"azure"}

    def test_for_a_person_by_another_connection(self, workspace):
        result = run("refresh", "--conn-id", "mine")
        assert result.exit_code == 0
        assert "Known, and can be launched" in result.output
        assert workspace.requests

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            pytest.param(
                ["--conn-id", "none_such"],
                "--conn-id 'none_such': is not defined: Airflow has no such connection. Define it in Airflow, or as "
                "AIRFLOW_CONN_NONE_SUCH.",
                id="no connection",
            ),
            pytest.param(
                ["--conn-id", "other"],
                "--conn-id 'other': is a connection of the type 'http'. Give one of the type databricks.",
                id="another type",
            ),
            pytest.param(["--conn-id", "empty"], "--conn-id 'empty': has no host.", id="no host"),
            pytest.param(["--save", "/no/such/folder/x.json"], "--save '/no/such/folder/x.json': cannot be", id="file"),
            pytest.param(["--conn-id", "none_such", "--cloud", "ibm"], "--cloud 'ibm'", id="all problems"),
        ],
    )
    def test_what_is_wrong(self, workspace, monkeypatch, words, said):
        monkeypatch.setenv("AIRFLOW_CONN_OTHER", '{"conn_type": "http", "host": "h", "password": "x"}')
        monkeypatch.setenv("AIRFLOW_CONN_EMPTY", '{"conn_type": "databricks"}')
        result = run("refresh", *words)
        assert result.exit_code == 2
        assert said in result.stderr

    @pytest.mark.parametrize(
        ("fault", "said"),
        [
            pytest.param(faults.refused_token(403), "the workspace refuses: ", id="refused"),
            pytest.param(faults.too_many_requests(3600), "no answer: the workspace asks for 3600 s", id="no answer"),
        ],
    )
    def test_a_workspace_that_does_not_tell(self, workspace, fault, said):
        workspace.fault(fault, path="clusters/*", times=10)
        result = run("refresh")
        assert result.exit_code == 2
        assert f"--conn-id 'databricks_default': {said}" in result.stderr
