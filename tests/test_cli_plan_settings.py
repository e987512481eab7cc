# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider plan``: what a workspace decides about its clusters, and whose prices are taken."""

from __future__ import annotations

from functools import partial

import command_line
import pytest
from deepspeed_provider.cli_options import flag
from deepspeed_provider.requested.cluster import CLUSTER_OPTIONS, asked_settings

SEVEN_B = ("--model", "llama-2-7b-hf", "--method", "lora", "--tokens", "50M")
run = partial(command_line.run, "plan")
as_json = partial(command_line.as_json, "plan")


class TestItsCluster:
    ONE = (*SEVEN_B, "--node-type", "g5.12xlarge", "--max-nodes", "1")

    def test_settings_arrive(self):
        cluster = as_json(
            *(*self.ONE, "--log-volume", "/Volumes/main/ml/logs", "--policy-id", "policy-1"),
            *("--tags", "team=ml", "--tags", "note=a=b", "--single-user-name", "trainers"),
            *("--model-cache-volume", "/Volumes/main/ml/models", "--spark-version", "16.4.x-gpu-ml-scala2.12"),
        )["cluster"]
        assert cluster["cluster_log_conf"] == {"volumes": {"destination": "/Volumes/main/ml/logs"}}
        assert cluster["custom_tags"] == {"team": "ml", "note": "a=b", "ResourceClass": "SingleNode"}
        assert cluster["policy_id"] == "policy-1"
        assert cluster["single_user_name"] == "trainers"
        assert cluster["spark_env_vars"]["HF_HUB_CACHE"] == "/Volumes/main/ml/models"
        assert cluster["spark_version"] == "16.4.x-gpu-ml-scala2.12"

    def test_pools(self):
        cluster = as_json(*self.ONE, "--instance-pool-id", "a", "--driver-instance-pool-id", "b")["cluster"]
        assert (cluster["instance_pool_id"], cluster["driver_instance_pool_id"]) == ("a", "b")
        assert "node_type_id" not in cluster

    def test_the_script_folder(self):
        settings = asked_settings({"script_folder": " /Volumes/main/ml/scripts "})
        assert settings.script_folder == "/Volumes/main/ml/scripts"

    def test_all_problems_at_once(self):
        result = run(*self.ONE, "--tags", "team", "--tokens", "many")
        assert result.exit_code == 2
        assert "--tags 'team': is no tag with a value. Write team=ml." in result.stderr
        assert "--tokens 'many'" in result.stderr
        result = run(*self.ONE, "--log-volume", "logs", "--spark-version", "9")
        assert "--log-volume 'logs': is no folder of a Volume" in result.stderr
        assert "--spark-version '9'" in result.stderr

    def test_help_has_them_all(self):
        said = run("--help", columns=200).output
        for name in CLUSTER_OPTIONS:
            assert flag(name) in said


class TestWhosePrices:
    @pytest.mark.parametrize(
        ("row", "date", "assumed", "warned"),
        [
            ("g5.12xlarge,5,,", "your own price", "us-east-1, your own price without a date", "list for us-east-1"),
            ("g5.12xlarge,5,2026-11-01,", "2026-11-01", "us-east-1, as of 2026-11-01", "list for us-east-1"),
            ("g5.12xlarge,5,,eu-west-1", "your own price", "eu-west-1, your own price", "list for us-east-1"),
            ("g5.12xlarge,,,eu-west-1", "2026-07-20", "eu-west-1, as of 2026-07-20", "no price of the machine"),
        ],
        ids=["undated", "dated", "elsewhere", "only elsewhere"],
    )
    def test_they_are_named(self, tmp_path, row, date, assumed, warned):
        mine = tmp_path / "mine.csv"
        mine.write_text(f"cloud,node_type_id,on_demand_usd_per_hour,price_date,region\naws,{row}\n")
        said = as_json(*SEVEN_B, "--catalog", str(mine), "--node-type", "g5.12xlarge", "--cloud", "aws")
        assert said["chosen"]["price_date"] == date
        assert any(assumed in text for text in said["assumptions"])
        assert any("g5.12xlarge" in text and warned in text for text in said["warnings"])

    @pytest.mark.parametrize(("cloud", "missing"), [("azure", True), ("aws", False), ("gcp", False)])
    def test_a_tier_that_a_cloud_has_not(self, cloud, missing):
        said = as_json(*SEVEN_B, "--cloud", cloud, "--tier", "enterprise")
        assert any("list prices of the enterprise tier" in text for text in said["assumptions"])
        assert any("enterprise tier has no list price on azure" in text for text in said["warnings"]) == missing
        premium = as_json(*SEVEN_B, "--cloud", cloud)
        assert any("list prices of the premium tier" in text for text in premium["assumptions"])
        assert not any("tier has no" in text for text in premium["warnings"])
