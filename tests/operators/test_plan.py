# SPDX-License-Identifier: Apache-2.0
"""GpuPlanOperator: what it hands on, what people read, and all that a request can get wrong."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException
from deepspeed_provider.cli import app
from deepspeed_provider.operators.plan import MARKDOWN_KEY, GpuPlanOperator
from deepspeed_provider.sizing.catalogue import model_config
from typer.testing import CliRunner

RUN = {"dag_id": "tuning", "run_id": "manual__2026-11-30T10:00:00+00:00", "task_id": "plan"}
SEVEN_B = {"model": "llama-2-7b-hf", "method": "lora", "tokens": "50M", "cloud": "aws"}
MINE = {
    "cloud": "aws",
    "node_type_id": "p9|huge",
    "gpu": "H200",
    "gpus": 8,
    "cores": 128,
    "ram_gib": 2048,
    "network_gbps": 3200,
    "dbu_per_hour": 10,
    "on_demand_usd_per_hour": 1.5,
    "region": "moon",
    "price_date": "2026-11-01",
}


def run(params: dict[str, Any] | None = None, **options: Any) -> tuple[dict[str, Any], str]:
    """(return value, Markdown) of a task with these options, rendered as Airflow renders them."""
    xcoms: dict[str, Any] = {}
    with DAG("dag", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC)):
        operator = GpuPlanOperator(task_id="plan", **options)
    instance = SimpleNamespace(**RUN, xcom_push=lambda key, value: xcoms.__setitem__(key, value))
    context: Any = {"ti": instance}
    operator.render_template_fields({**context, "params": params or {}})
    try:
        return operator.execute(context), xcoms[MARKDOWN_KEY]
    except AirflowFailException as error:
        error.markdown = xcoms.get(MARKDOWN_KEY)  # type: ignore[attr-defined]
        raise


def untagged(plan: dict[str, Any]) -> dict[str, Any]:
    """Without the tags by which it knows its run."""
    tags = {name: tag for name, tag in plan["cluster"].pop("custom_tags").items() if not name.startswith("airflow_")}
    return plan | {"cluster": plan["cluster"] | ({"custom_tags": tags} if tags else {})}


def printed(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class TestWhatItReturns:
    def test_it_is_what_the_command_line_prints(self) -> None:
        words = ["--model", "llama-2-7b-hf", "--method", "lora", "--tokens", "50M", "--cloud", "aws", "--top", "4"]
        returned, _ = run(**SEVEN_B, top=4)
        assert untagged(returned) == printed(*words)
        assert json.loads(json.dumps(returned)) == returned

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (
                {"objective": "time", "max_nodes": 2, "spot": True},
                ["--objective", "time", "--max-nodes", "2", "--spot"],
            ),
            ({"max_usd_per_hour": 20.0, "deadline_hours": 3}, ["--max-usd-per-hour", "20", "--deadline-hours", "3"]),
            ({"node_type": ["a2", "g2-standard-4"]}, ["--node-type", "a2", "--node-type", "g2-standard-4"]),
            (
                {"min_compute_capability": 8.0, "tier": "enterprise"},
                ["--min-compute-capability", "8", "--tier", "enterprise"],
            ),
            ({"options": {"lora_rank": 64, "attention": "flash"}}, ["--lora-rank", "64", "--attention", "flash"]),
        ],
        ids=["objective", "limits", "node types", "capability", "options of the training"],
    )
    def test_every_option_is_the_command_lines(self, options: dict[str, Any], words: list[str]) -> None:
        common = ["--model", "llama-2-7b-hf", "--method", "lora", "--tokens", "50M", "--cloud", "gcp"]
        assert untagged(run(**{**SEVEN_B, "cloud": "gcp"}, **options)[0]) == printed(*common, *words)

    def test_a_config_as_a_mapping(self) -> None:
        config = {**model_config("llama-2-7b-hf"), "_name_or_path": "mine"}
        returned, markdown = run(**{**SEVEN_B, "model": config})
        assert returned["chosen"] == run(**SEVEN_B)[0]["chosen"]
        assert returned["model"] == "mine"
        assert markdown.startswith("### mine\n")

    def test_a_folder_rows_and_a_count(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(model_config("gpt2")))
        by_rows, _ = run(model=str(tmp_path), rows="10K", sequence_length="512", cloud="gcp")
        assert by_rows["tokens"] == 5_120_000
        assert by_rows["chosen"] == run(model="gpt2", tokens=5_120_000, sequence_length=512, cloud="gcp")[0]["chosen"]
        assert run(parameters="7B", tokens="1M")[0]["model"] == "7,000,000,000 parameters"


class TestHardwareThatIsThere:
    ASKED: ClassVar = {"model": "llama-2-7b-hf", "method": "lora", "tokens": "50M"}
    EIGHT: ClassVar = {"gpu": "A100-80GB", "gpus_per_node": 8, "nodes": 2, "ram_gib": "1000", "usd_per_hour": 40.5}
    WORDS = (
        *("--model", "llama-2-7b-hf", "--method", "lora", "--tokens", "50M", "--gpu", "A100-80GB"),
        *("--gpus-per-node", "8", "--nodes", "2", "--ram-gib", "1000", "--usd-per-hour", "40.5"),
    )

    @pytest.mark.parametrize("form", [dict, json.dumps], ids=["mapping", "JSON text"])
    def test_it_is_what_the_command_line_prints(self, form: Any) -> None:
        returned, markdown = run(**self.ASKED, hardware=form({**self.EIGHT, "nvme_gib": ""}))
        assert returned == printed(*self.WORDS)
        assert "**2 x 8 A100-80GB: bf16, ZeRO " in markdown
        assert " h, $" in markdown
        assert re.search(r"It fills: each GPU [\d.]+ of 79\.1 GiB; each host [\d.]+ of 1,000\.0 GiB\.", markdown)
        assert "- No node has an NVMe drive for offload" in markdown

    def test_params_of_a_form(self) -> None:
        params = {"gpu": "A100-80GB", "gpus": 8}
        asked = {"gpu": "{{ params.gpu }}", "gpus_per_node": "{{ params.gpus }}"}
        assert run(params, **self.ASKED, hardware=asked)[0]["chosen"]["settings"]["gpus_per_node"] == 8

    def test_it_is_too_small(self) -> None:
        with pytest.raises(AirflowFailException, match=r"does not fit 1 x 1 T4\. Nearest: ") as caught:
            run(**{**self.ASKED, "method": "full"}, hardware={"gpu": "T4", "gpus_per_node": 1})
        assert "**Nothing fits 1 x 1 T4.**" in caught.value.markdown  # type: ignore[attr-defined]

    def test_all_problems_at_once(self) -> None:
        wrong = {**self.EIGHT, "gpus": 8, "nodes": 0}
        with pytest.raises(AirflowFailException) as caught:
            run(**self.ASKED, hardware=wrong, cloud="aws", databricks_conn_id="mine", options={"lora_rnk": 8})
        for text in (
            "hardware.gpus = 8: there is no such option. Did you mean 'gpu'?",
            "hardware.nodes = 0: should be a whole number from 1",
            "cloud = 'aws': is for machines that are yet to be chosen",
            "databricks_conn_id = 'mine': is for machines that are yet to be chosen",
            "lora_rnk = 8: there is no such option. Did you mean 'lora_rank'?",
        ):
            assert text in str(caught.value)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"catalog": [MINE]}, "catalog = '(its content)': is for machines that are yet to be chosen"),
            ({"node_type": ["g5", "g6"]}, "node_type = 'g5, g6': is for"),
            ({"spot": True}, "spot = True: is for"),
            ({"options": {"gpu": "T4"}}, "gpu = 'T4': there is no such option"),
        ],
    )
    def test_what_is_for_a_search_is_named(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(AirflowFailException) as caught:
            run(**self.ASKED, hardware=self.EIGHT, **options)
        assert f"- {said}" in str(caught.value)

    def test_switches_that_are_off_and_numbers_as_forms_give_them(self) -> None:
        loose = {"gpu": "A100-80GB", "gpus_per_node": 8.0, "nvme_gib": 0, "usd_per_hour": 0}
        returned, _ = run(**self.ASKED, hardware=loose, spot="False")
        assert returned["chosen"]["settings"]["gpus_per_node"] == 8
        assert returned["chosen"]["usd"] == 0


class TestLooseValues:
    NAMES = ("model", "method", "tokens", "cloud", "region", "node_type", "spot", "budget_usd", "top", "catalog")

    def test_params_of_a_form_are_taken_as_they_render(self) -> None:
        params = dict.fromkeys(self.NAMES) | {
            **SEVEN_B,
            "cloud": "gcp",
            "spot": True,
            "budget_usd": 500.0,
            "top": 3,
            "region": "",
        }
        returned, _ = run(params, **{name: f"{{{{ params.{name} }}}}" for name in self.NAMES})
        assert returned == run(**{**SEVEN_B, "cloud": "gcp"}, spot=True, budget_usd=500, top=3)[0]
        assert returned["chosen"]["spot"] is True

    @pytest.mark.parametrize("spot", ["False", "false", False, "", None])
    def test_a_switch_that_is_off(self, spot: Any) -> None:
        assert run(**SEVEN_B, spot=spot)[0]["chosen"]["spot"] is False

    def test_what_is_not_given_leaves_room_for_an_option(self) -> None:
        asked = {name: value for name, value in SEVEN_B.items() if name != "method"}
        options = {"method": "full", "lora_rank": "None"}
        assert run(**asked, method="", options=options)[0] == run(**asked, method="full")[0]

    def test_names_separated_by_commas(self) -> None:
        found = run(**SEVEN_B, node_type="p4d, G6E.12XLARGE ,")[0]["candidates"]
        assert {one["node_type_id"] for one in found} == {"p4d.24xlarge", "p4de.24xlarge", "g6e.12xlarge"}


class TestItsCluster:
    SETTINGS: ClassVar = {
        "log_volume": "/Volumes/main/ml/logs",
        "policy_id": "policy-1",
        "single_user_name": "trainers",
        "model_cache_volume": "/Volumes/main/ml/models",
        "spark_version": "16.4.x-gpu-ml-scala2.12",
        "instance_pool_id": "pool-gpu",
        "driver_instance_pool_id": "pool-driver",
    }

    def test_tags_lead_back_to_the_task(self) -> None:
        tags = run({"team": "ml"}, **SEVEN_B, node_type="g5.12xlarge", max_nodes=1, tags={"team": "{{ params.team }}"})
        assert tags[0]["cluster"]["custom_tags"] == {
            "airflow_dag_id": "tuning",
            "airflow_run_id": "manual__2026-11-30T10:00:00+00:00",
            "airflow_task_id": "plan",
            "team": "ml",
            "ResourceClass": "SingleNode",
        }

    def test_ones_own_tag_goes_first(self) -> None:
        tags = run(**SEVEN_B, tags="airflow_dag_id=other, cost = 7")[0]["cluster"]["custom_tags"]
        assert (tags["airflow_dag_id"], tags["airflow_run_id"], tags["cost"]) == ("other", RUN["run_id"], "7")

    def test_every_setting_arrives_templated(self) -> None:
        templates = {name: f"{{{{ params.{name} }}}}" for name in self.SETTINGS}
        cluster = run(self.SETTINGS, **SEVEN_B, **templates)[0]["cluster"]
        assert cluster["cluster_log_conf"] == {"volumes": {"destination": "/Volumes/main/ml/logs"}}
        assert cluster["spark_env_vars"]["HF_HUB_CACHE"] == "/Volumes/main/ml/models"
        for name in ("policy_id", "single_user_name", "spark_version", "instance_pool_id", "driver_instance_pool_id"):
            assert cluster[name] == self.SETTINGS[name]

    def test_what_is_empty_is_not_given(self) -> None:
        plain = run(**SEVEN_B)[0]
        assert run(**SEVEN_B, **dict.fromkeys(self.SETTINGS, ""), tags="None")[0] == plain

    def test_what_cannot_work_fails_without_a_retry(self) -> None:
        with pytest.raises(AirflowFailException, match=r"log_volume = 'logs'.*is no folder of a Volume"):
            run(**SEVEN_B, log_volume="logs")


class TestOwnRowsAndWorkspace:
    @pytest.mark.parametrize("kind", ["rows", "file"])
    def test_rows_of_ones_own(self, tmp_path: Path, kind: str) -> None:
        file = tmp_path / "mine.json"
        file.write_text(json.dumps([MINE]))
        returned, markdown = run(**SEVEN_B, catalog=[MINE] if kind == "rows" else str(file))
        assert returned["chosen"]["node_type_id"] == "p9|huge"
        assert "| ➤ | **p9\\|huge** |" in markdown, "a name cannot break the table"
        assert "**moon** | **2026-11-01** |" in markdown

    @pytest.mark.parametrize("kind", ["answer", "list", "file"])
    def test_only_what_the_workspace_has(self, tmp_path: Path, kind: str) -> None:
        entries = [{"node_type_id": "g5.12xlarge", "num_gpus": 4}, {"node_type_id": "p9.huge", "num_gpus": 8}]
        file = tmp_path / "types.json"
        file.write_text(json.dumps({"node_types": entries}))
        given = {"answer": {"node_types": entries}, "list": entries, "file": str(file)}[kind]
        returned, markdown = run(**SEVEN_B, workspace_node_types=given)
        assert {one["node_type_id"] for one in returned["candidates"]} == {"g5.12xlarge"}
        assert "not in this workspace" in markdown
        assert any("p9.huge" in text for text in returned["warnings"])


class TestMarkdown:
    def test_the_chosen_row_with_its_price_date_and_region(self) -> None:
        returned, markdown = run(**SEVEN_B)
        chosen = returned["chosen"]
        rows = [line for line in markdown.splitlines() if line.startswith("|")]
        assert len(rows) == 2 + len(returned["candidates"])
        assert {row.count(" | ") for row in rows} == {10}
        (marked,) = [row for row in rows if "➤" in row]
        for text in (chosen["node_type_id"], f"{chosen['usd']:,.2f}", chosen["region"], chosen["price_date"]):
            assert f"**{text}**" in marked
        assert f"**{chosen['node_type_id']}: ${chosen['usd']:,.2f}** for" in markdown
        several = next(one for one in returned["candidates"] if one["nodes"] > 1)
        assert f"| {several['nodes']}+1 x {several['node_type_id']} |" in markdown, "its driver is paid too"

    def test_refusals_are_grouped_by_reason(self) -> None:
        returned, markdown = run(**SEVEN_B)
        section = markdown.partition(f"**Not chosen: {len(returned['rejected'])} node types**\n\n")[2]
        lines = section.partition("\n\n")[0].splitlines()
        assert 3 < len(lines) < len(returned["rejected"]) / 4
        assert any("retired: Databricks no longer launches it" in line for line in lines)
        assert "not in aws" in lines[-1], "other clouds' last"

    def test_assumptions_and_warnings(self) -> None:
        returned, markdown = run(**SEVEN_B)
        for text in (*returned["assumptions"], *returned["warnings"]):
            assert f"\n- {text}" in markdown


WRONG = {
    "nothing": ({}, ["model = None: is missing", "tokens = None: is missing", "2 problems"]),
    "all at once": (
        {
            **{"model": "gpt-2-large", "method": "loar", "tokens": "x", "cloud": "ibm", "max_nodes": 0, "top": [1]},
            **{"spot": "maybe", "budget_usd": [5], "tier": "gold", "catalog": {"cloud": "aws"}, "deadline_hours": True},
            **{"workspace_node_types": 3, "options": {"lora_rnak": 8}, "sequence_length": "0"},
        },
        [
            *[
                "model = 'gpt-2-large'",
                "method = 'loar'",
                "tokens = 'x'",
                "cloud = 'ibm'",
                "max_nodes = 0",
                "top = [1]",
            ],
            *[
                "spot = 'maybe'",
                "budget_usd = [5]",
                "tier = 'gold'",
                "catalog = {'cloud': 'aws'}: is no list of objects",
            ],
            *["deadline_hours = True", "workspace_node_types = '(its content)'", "Did you mean 'lora_rank'?"],
            "sequence_length = '0'",
        ],
    ),
    "tokens and rows": ({**SEVEN_B, "rows": 5}, ["rows = 5: says the same as tokens"]),
    "a row that is wrong": ({**SEVEN_B, "catalog": [{**MINE, "gpus": "x"}]}, ["catalog.p9|huge.gpus = 'x'"]),
    "no such file": ({**SEVEN_B, "workspace_node_types": "/no/such"}, ["workspace_node_types = '/no/such'"]),
    "options that are none": ({**SEVEN_B, "options": "lora_rank"}, ["options = 'lora_rank': should be a mapping"]),
    "an unknown node type": ({**SEVEN_B, "node_type": "p4d.24xlrge"}, ["Did you mean 'p4d.24xlarge'?"]),
}


class TestWhatFails:
    @pytest.mark.parametrize(("options", "said"), WRONG.values(), ids=WRONG)
    def test_all_problems_are_named_without_a_retry(self, options: dict[str, Any], said: list[str]) -> None:
        with pytest.raises(AirflowFailException) as caught:
            run(**options)
        for text in said:
            assert text in str(caught.value)

    def test_nothing_fits(self) -> None:
        options = {
            "model": "llama-2-7b-hf",
            "method": "full",
            "tokens": "1M",
            "node_type": "g5.2xlarge",
            "max_nodes": 1,
        }
        with pytest.raises(AirflowFailException, match=r"Nothing fits llama-2-7b-hf.\nNearest: g5.2xlarge, ") as caught:
            run(**options)
        assert "too little" in str(caught.value)
        assert "It would fit with " in str(caught.value)
        assert "**Nothing fits.**" in caught.value.markdown  # type: ignore[attr-defined]

    def test_over_budget(self) -> None:
        with pytest.raises(AirflowFailException, match="It would fit with a budget of"):
            run(**SEVEN_B, budget_usd="0.01")
