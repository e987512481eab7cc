# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider plan``: the table, JSON, refusals, and all that a user can get wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial

import command_line
import pytest
from deepspeed_provider.cli_options import flag
from deepspeed_provider.clusters.job import Constraints, Job, Objective
from deepspeed_provider.clusters.node_types import Cloud, node_types
from deepspeed_provider.clusters.search import search
from deepspeed_provider.requested.plan import JOB_OPTIONS
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import TrainingOptions

SEVEN_B = ("--model", "llama-2-7b-hf", "--method", "lora", "--tokens", "50M")
MINE = "cloud,node_type_id,gpu,gpus,cores,ram_gib,network_gbps,dbu_per_hour,on_demand_usd_per_hour,region,price_date"


run = partial(command_line.run, "plan")
as_json = partial(command_line.as_json, "plan")


class TestJson:
    @pytest.mark.parametrize("objective", Objective)
    @pytest.mark.parametrize("cloud", Cloud)
    def test_it_is_the_search(self, cloud, objective):
        said = as_json(*SEVEN_B, "--cloud", cloud, "--objective", objective)
        job = Job(
            architecture=architecture(model_config("llama-2-7b-hf")),
            options=TrainingOptions(method="lora"),
            tokens=50_000_000,
            effective_batch_size=64,
        )
        found = search(job, node_types(), Constraints(clouds=frozenset([cloud])), objective)
        assert [(one["node_type_id"], one["nodes"]) for one in said["candidates"]] == [
            (one.node_type.node_type_id, one.nodes) for one in found.candidates
        ]
        assert said["chosen"] == said["candidates"][0]
        assert len(said["candidates"]) == 10

    def test_these_keys(self):
        said = as_json(*SEVEN_B, "--cloud", "aws", "--region", "us-east-1")
        wanted = {"chosen", "candidates", "rejected", "deepspeed_config", "cluster", "assumptions", "warnings"}
        assert wanted <= set(said)
        assert all(one["reason"] for one in said["rejected"])
        assert said["cluster"]["node_type_id"] == said["chosen"]["node_type_id"]
        assert said["deepspeed_config"]["train_batch_size"] == 64
        assert said["chosen"]["settings"]["precision"] in ("bf16", "fp16")
        assert {"region", "price_date", "usd", "hours", "throughput"} <= set(said["chosen"])

    def test_rows_are_tokens_of_the_sequence_length(self):
        rows = as_json("--model", "gpt2", "--rows", "10K", "--sequence-length", "512", "--cloud", "gcp")
        tokens = as_json("--model", "gpt2", "--tokens", "5_120_000", "--sequence-length", "512", "--cloud", "gcp")
        assert rows["tokens"] == tokens["tokens"] == 5_120_000
        assert rows["candidates"] == tokens["candidates"]
        assert rows["assumptions"][0].startswith("10,000 rows of 512 tokens")

    def test_a_model_of_few_positions(self):
        words = ("--model", "gpt2", "--tokens", "10M", "--cloud", "gcp")
        usual = as_json(*words)
        assert usual["assumptions"][0] == "The sequence length is 1,024, all the positions that the model knows."
        assert usual["candidates"] == as_json(*words, "--sequence-length", "1024")["candidates"]
        result = run(*words, "--sequence-length", "1025", columns=200)
        assert result.exit_code == 2
        assert "is beyond the 1,024 positions that gpt2 has learned" in result.stderr
        # Rotary positions go on, worse.
        rotary = as_json("--model", "llama-2-7b-hf", "--tokens", "10M", "--sequence-length", "8192", "--cloud", "gcp")
        assert "beyond the 4,096 positions" in " ".join(rotary["warnings"])

    @pytest.mark.parametrize(
        ("words", "doubt"),
        [
            (["--method", "qlora"], "bitsandbytes"),
            (["--method", "lora", "--node-type", "g5.12xlarge", "--objective", "time"], "adapters on two nodes"),
            (["--method", "full", "--node-type", "p4d", "--objective", "time"], "with 400 Gbit/s between them"),
            (["--method", "full", "--node-type", "p4d", "--max-nodes", "1"], ""),
        ],
        ids=["4 bits", "adapters on several nodes", "a slow network", "as measured"],
    )
    def test_speeds_that_nobody_measured_are_doubted(self, words, doubt):
        said = as_json("--model", "llama-2-7b-hf", "--tokens", "50M", *words)["warnings"]
        doubts = [text for text in said if text.endswith("time and price of this plan may be far off.")]
        assert len(doubts) == bool(doubt)
        assert doubt in "".join(doubts)

    def test_limits_are_kept(self):
        words = ["--max-usd-per-hour", "20", "--deadline-hours", "3", "--budget-usd", "60", "--max-nodes", "2"]
        said = as_json(*SEVEN_B, *words)
        assert said["candidates"]
        for one in said["candidates"]:
            assert one["usd_per_hour"] <= 20
            assert one["hours"] <= 3
            assert one["usd"] <= 60
            assert one["nodes"] <= 2

    def test_spot(self):
        said = as_json(*SEVEN_B, "--cloud", "gcp", "--spot", "--tier", "enterprise")
        assert said["chosen"]["spot"] is True
        assert said["cluster"]["gcp_attributes"]["availability"].startswith("PREEMPTIBLE")
        assert said["chosen"]["usd"] < as_json(*SEVEN_B, "--cloud", "gcp")["chosen"]["usd"]

    @pytest.mark.parametrize(
        ("words", "ids"),
        [
            (["--node-type", "p4d.24xlarge"], {"p4d.24xlarge"}),
            (["--node-type", "p4", "--node-type", "G6E.12XLARGE"], {"p4d.24xlarge", "p4de.24xlarge", "g6e.12xlarge"}),
        ],
        ids=["one", "a family and one"],
    )
    def test_only_these_node_types(self, words, ids):
        found = as_json(*SEVEN_B, "--top", "50", *words)["candidates"]
        assert {one["node_type_id"] for one in found} == ids

    @pytest.mark.parametrize("words", [["--min-compute-capability", "8"], ["--attention", "flash"]])
    def test_old_gpus_are_refused(self, words):
        said = as_json("--model", "gpt2", "--tokens", "1M", "--sequence-length", "512", *words, "--cloud", "aws")
        assert not {"T4", "V100-16GB"} & {one["gpu"] for one in said["candidates"]}
        reasons = {one["node_type_id"]: one["reason"] for one in said["rejected"]}
        assert reasons["g4dn.xlarge"].startswith("T4 has compute capability 7.5")

    def test_top(self):
        assert len(as_json(*SEVEN_B, "--top", "3")["candidates"]) == 3

    def test_the_job_has_the_options_that_were_given(self):
        short = as_json(*SEVEN_B, "--effective-batch-size", "128", "--sequence-length", "1024", "--attention", "flash")
        assert short["effective_batch_size"] == 128
        assert short["steps"] == 50_000_000 // (128 * 1024) + 1
        assert short["cluster"]["spark_version"] == "16.4.x-gpu-ml-scala2.12", "its flash-attn fits its torch"


WRONG_TABLES = {
    "no such file": (None, "cannot be read"),
    "binary": (b"\xff\xfe\x00", "cannot be read"),
    "empty": (b"", "no columns cloud and node_type_id"),
    "prose": (b"hello\nworld\n", "no columns cloud and node_type_id"),
    "too many cells": (b"cloud,node_type_id\naws,p4d.24xlarge,3\n", "row 1 has more cells than the 2 columns"),
    "an object": (b'{"cloud": "aws"}', "is no list of objects"),
    "broken": (b'[{"cloud": ', "is not JSON"),
    "a list of numbers": (b"[1, 2]", "is no list of objects"),
    "no such column": (b"cloud,node_type_id,gpuz\naws,p4d.24xlarge,3\n", "In --catalog, p4d.24xlarge.gpuz '3'"),
    "no such cloud": (b"cloud,node_type_id\nmoon,p4d.24xlarge\n", "In --catalog, p4d.24xlarge.cloud"),
    "a bad price": (
        b"cloud,node_type_id,on_demand_usd_per_hour\naws,p4d.24xlarge,-1\n",
        "In --catalog, p4d.24xlarge.on_demand_usd_per_hour '-1'",
    ),
    "a number that is none": (
        b'[{"cloud": "aws", "node_type_id": "p4d.24xlarge", "nvme_gb": 1e308, "gpus": 1e30}]',
        "In --catalog, p4d.24xlarge.nvme_gb 1e+308",
    ),
    "a bad value": (b'[{"cloud": ["aws"], "node_type_id": {}}]', "In --catalog"),
}


class TestCatalogue:
    ROW = "aws,p9.huge,H200,8,128,2048,3200,10,1.5,moon,2026-11-01"

    @pytest.mark.parametrize("kind", ["csv", "json"])
    def test_rows_of_ones_own(self, tmp_path, kind):
        file = tmp_path / f"mine.{kind}"
        row = dict(zip(MINE.split(","), self.ROW.split(","), strict=True))
        file.write_text(f"{MINE}\n{self.ROW}\n" if kind == "csv" else json.dumps([row]))
        said = as_json(*SEVEN_B, "--catalog", str(file), "--region", "moon")
        assert said["chosen"]["node_type_id"] == "p9.huge"
        assert "moon" in " ".join(said["assumptions"])
        assert "2026-11-01" in " ".join(said["assumptions"])

    def test_a_negotiated_price(self, tmp_path):
        file = tmp_path / "mine.csv"
        file.write_text("cloud,node_type_id,on_demand_usd_per_hour\naws,p4d.24xlarge,2.5\n")
        assert as_json(*SEVEN_B, "--catalog", str(file))["chosen"]["node_type_id"] == "p4d.24xlarge"

    @pytest.mark.parametrize(("content", "said"), WRONG_TABLES.values(), ids=WRONG_TABLES)
    def test_a_table_that_cannot_be_used(self, tmp_path, content, said):
        file = tmp_path / "mine"
        if content is not None:
            file.write_bytes(content)
        result = run(*SEVEN_B, "--catalog", str(file), "--top", "0")
        assert result.exit_code == 2
        assert said in result.stderr
        assert "--top '0'" in result.stderr, "all problems together"


class TestWorkspace:
    def test_only_what_it_has(self, tmp_path):
        file = tmp_path / "types.json"
        entries = [{"node_type_id": "g5.12xlarge", "num_gpus": 4}, {"node_type_id": "p9.huge", "num_gpus": 8}]
        for content in ({"node_types": entries}, entries):
            file.write_text(json.dumps(content))
            said = as_json(*SEVEN_B, "--cloud", "aws", "--workspace-node-types", str(file))
            assert {one["node_type_id"] for one in said["candidates"]} == {"g5.12xlarge"}
            reasons = {one["node_type_id"]: one["reason"] for one in said["rejected"]}
            assert reasons["p4d.24xlarge"] == "not in this workspace"
            assert any("p9.huge" in text for text in said["warnings"])

    @pytest.mark.parametrize(
        "content",
        [
            *["", "nothing", "{}", "3", '{"node_types": 3}', "[3]", '[{"node_type_id": 3}]'],
            *['[{"node_type_id": "a", "num_gpus": "8"}]', '[{"node_type_id": "a", "node_info": "x"}]'],
            '[{"node_type_id": "p4d.24xlarge", "node_info": {"status": "x"}}]',
        ],
    )
    def test_an_answer_that_is_none(self, tmp_path, content):
        file = tmp_path / "types.json"
        file.write_text(content)
        result = run(*SEVEN_B, "--workspace-node-types", str(file))
        assert result.exit_code == 2
        assert "--workspace-node-types" in result.stderr


class TestForAPerson:
    def test_the_table_with_the_chosen_row_marked(self):
        said, exact = run(*SEVEN_B, "--cloud", "aws").output, as_json(*SEVEN_B, "--cloud", "aws")
        marked = [line for line in said.splitlines() if line.lstrip().startswith(">")]
        chosen = exact["chosen"]
        assert len(marked) == 1
        assert chosen["node_type_id"] in marked[0]
        for number in (f"{chosen['usd']:,.2f}", f"{chosen['usd_per_hour']:,.2f}", f"{chosen['hours']:,.1f}"):
            assert number in marked[0]
        assert f"{chosen['throughput']['tokens_per_second']:,.0f}" in marked[0]
        for one in exact["candidates"]:
            assert one["node_type_id"] in said
        several = next(one for one in exact["candidates"] if one["nodes"] > 1)
        assert f"{several['nodes']}+1 x {several['node_type_id']}" in said, "its driver is paid too"
        assert "us-east-1, as of 2026-07-20" in said

    def test_bars_of_memory(self):
        said = run(*SEVEN_B, "--cloud", "aws").output
        assert re.search(r"each GPU +[\d.]+ +[\d.]+ +━+", said)
        assert re.search(r"each host +[\d.,]+ +[\d.,]+ +", said)

    def test_refusals_are_grouped_until_all_are_asked_for(self):
        short, long = run(*SEVEN_B, "--cloud", "aws").output, run(*SEVEN_B, "--cloud", "aws", "--all").output
        rejected = as_json(*SEVEN_B, "--cloud", "aws")["rejected"]
        assert f"Not chosen: {len(rejected)} node types" in short
        assert "retired: Databricks no longer launches it" in short
        assert len(long.splitlines()) > len(short.splitlines()) + 40
        for one in rejected:
            assert f"- {one['node_type_id']}: " in long

    def test_a_narrow_terminal(self):
        said = run(*SEVEN_B, "--cloud", "azure", columns=80).output
        assert all(len(line) <= 80 for line in said.splitlines())
        assert "…" not in said
        assert "ZeRO" in said

    def test_nothing_fits(self):
        words = ["--model", "llama-2-7b-hf", "--tokens", "1M", "--node-type", "g5.2xlarge", "--max-nodes", "1"]
        result = run(*words)
        assert result.exit_code == 1
        assert "Nothing fits." in result.output
        assert re.search(r"Nearest: g5.2xlarge, [\d.]+ GiB of .* too little", result.output)
        assert "It would fit with" in result.output
        said = as_json(*words, exit_code=1)
        assert said["chosen"] is said["deepspeed_config"] is said["cluster"] is None
        assert said["candidates"] == []
        assert said["would_fit"]
        assert said["nearest_miss"]["resource"]

    def test_a_budget_that_nothing_meets(self):
        result = run(*SEVEN_B, "--budget-usd", "0.01")
        assert result.exit_code == 1
        assert "over budget" in result.output
        assert "is the cheapest that fits; the budget is $0.01." in result.output
        assert "It would fit with a budget of $" in result.output
        limited = as_json(*SEVEN_B, "--budget-usd", "0.01", exit_code=1)["nearest_miss"]
        cheapest = as_json(*SEVEN_B)["chosen"]
        assert {name: limited[name] for name in ("node_type_id", "nodes", "usd", "hours")} == {
            name: cheapest[name] for name in ("node_type_id", "nodes", "usd", "hours")
        }

    @pytest.mark.parametrize(
        ("words", "helps"),
        [
            (["--min-compute-capability", "99"], "GPUs of any generation ("),
            (["--attention", "flash", "--node-type", "g4dn.12xlarge"], "sdpa attention (g4dn.12xlarge x "),
        ],
        ids=["a limit", "kernels"],
    )
    def test_too_old_gpus_are_no_dead_end(self, words, helps):
        said = as_json(*SEVEN_B, *words, exit_code=1)
        assert any(text.startswith(helps) for text in said["would_fit"])
        reasons = " ".join(one["reason"] for one in said["rejected"])
        assert ("flash attention needs at least 8.0" in reasons) == ("flash" in words)
        assert ("at least 99.0 is asked for" in reasons) == ("99" in words)

    def test_a_missing_spot_price_says_how_to_give_one(self):
        said = run(*SEVEN_B, "--cloud", "aws", "--spot").output
        assert "no known spot price; a row of your own gives one (catalog, spot_usd_per_hour)" in " ".join(said.split())

    def test_prices_of_two_regions_are_named(self, tmp_path):
        file = tmp_path / "mine.csv"
        file.write_text("cloud,node_type_id,region,on_demand_usd_per_hour\naws,p4d.24xlarge,eu-west-1,20\n")
        words = [*SEVEN_B, "--cloud", "aws", "--catalog", str(file)]
        said = run(*words).output
        assert "p4d.24xlarge in eu-west-1" in said
        assert "p4d.24xlarge in us-east-1" in said
        assert "compared by prices of several regions; limit the plan to yours (region)." in " ".join(said.split())
        only = run(*words, "--region", "eu-west-1").output
        assert " in eu-west-1 " not in only.partition("Assumptions")[0]
        assert "several regions" not in only

    def test_several_nodes_are_chosen_with_their_driver(self):
        words = ["--deadline-hours", "0.5", "--objective", "time", "--cloud", "aws"]
        chosen = as_json(*SEVEN_B, *words)["chosen"]
        assert chosen["nodes"] > 1
        said = run(*SEVEN_B, *words).output
        assert f"Chosen: {chosen['nodes']}+1 x {chosen['node_type_id']}, " in said

    def test_one_step_is_one(self):
        said = run("--model", "gpt2", "--tokens", "1K", "--cloud", "aws").output
        assert "in 1 step of 64" in said
        assert "- 1 optimizer step of 64" in said


WRONG = {
    "nothing": ([], ["--model: is missing", "--tokens: is missing"]),
    "tokens and rows": ([*SEVEN_B, "--rows", "5"], ["--rows '5': says the same as tokens"]),
    "no number": (["--model", "gpt2", "--tokens", "many"], ["--tokens 'many': is no number of tokens"]),
    "no tokens": (["--model", "gpt2", "--tokens", "0"], ["--tokens '0'"]),
    "no rows": (["--model", "gpt2", "--rows", "-5"], ["--rows '-5': is no number of rows"]),
    "region": ([*SEVEN_B, "--cloud", "aws", "--region", "eu-west-1"], ["--region 'eu-west-1'", "us-east-1"]),
    "node type": ([*SEVEN_B, "--cloud", "aws", "--node-type", "p4d.24xlrge"], ["Did you mean 'p4d.24xlarge'?"]),
    "another cloud's type": ([*SEVEN_B, "--cloud", "gcp", "--node-type", "p4d"], ["--node-type 'p4d'"]),
    "empty node type": ([*SEVEN_B, "--node-type", ""], ["--node-type ''"]),
    "targets": ([*SEVEN_B, "--lora-targets", "zz", "--top", "0"], ["--lora-targets 'zz'", "--top '0'"]),
    "all at once": (
        [
            *["--model", "gpt-2-large", "--method", "loar", "--tokens", "x", "--cloud", "ibm", "--max-nodes", "0"],
            *["--objective", "speed", "--max-usd-per-hour", "nan", "--budget-usd", "-1", "--deadline-hours", "soon"],
            *["--effective-batch-size", "1.5", "--top", "0", "--tier", "gold", "--sequence-length", "0"],
            *["--min-compute-capability", "new"],
            *["--catalog", "/no/such/file", "--workspace-node-types", "/no/such/file"],
        ],
        [
            *["--model 'gpt-2-large'", "--method 'loar'", "--tokens 'x'", "--cloud 'ibm'", "--max-nodes '0'"],
            *["--objective 'speed'", "--max-usd-per-hour 'nan'", "--budget-usd '-1'", "--deadline-hours 'soon'"],
            *["--effective-batch-size '1.5'", "--top '0'", "--sequence-length '0'"],
            *["--min-compute-capability 'new'", "--tier 'gold'", "--workspace-node-types '/no/such/file'"],
        ],
    ),
    "a file that is none": ([*SEVEN_B, "--catalog", "/"], ["--catalog '/': cannot be read (Is a directory)"]),
}


class TestWhatIsWrong:
    @pytest.mark.parametrize(("words", "said"), WRONG.values(), ids=WRONG)
    def test_every_problem_is_named(self, words, said):
        result = run(*words)
        assert result.exit_code == 2
        assert not result.stdout
        for text in said:
            assert text in result.stderr

    def test_a_program_reads_them_as_json(self):
        said = as_json("--model", "gpt2", "--tokens", "x", "--cloud", "ibm", exit_code=2)
        assert {problem["field"] for problem in said["error"]["problems"]} == {"tokens", "cloud"}

    @pytest.mark.parametrize(
        "words",
        [
            ["--tokens", "1e15", "--effective-batch-size", str(2**20), "--sequence-length", str(10**14)],
            ["--tokens", "1", "--effective-batch-size", "1", "--sequence-length", "1"],
            ["--tokens", "1M", "--effective-batch-size", "7", "--top", "1000", "--max-nodes", "64"],
        ],
        ids=["huge", "tiny", "prime"],
    )
    def test_extremes_are_answered(self, words):
        assert run("--model", "HuggingFaceTB/SmolLM2-135M", *words).exit_code in (0, 1)


def test_every_option_of_the_job_is_one_of_training():
    assert set(JOB_OPTIONS) < set(TrainingOptions.model_fields)
    said = run("--help", columns=200).output
    for name in JOB_OPTIONS:
        assert flag(name) in said
    assert "precision" not in JOB_OPTIONS
    assert "--zero-stage" not in said


def test_nothing_heavy_is_loaded(tmp_path):
    probe = (
        "import atexit, sys\n"
        "names = lambda: {name.partition('.')[0] for name in sys.modules}\n"
        "atexit.register(lambda: print(*names(), file=sys.stderr))\n"
        "from deepspeed_provider.cli import app\n"
        "app(['plan', '--model', 'gpt2', '--tokens', '1M', '--json'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        env={**os.environ, "AIRFLOW_HOME": str(tmp_path)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["chosen"]
    loaded = set(done.stderr.split())
    assert "deepspeed_provider" in loaded
    assert not loaded & command_line.HEAVY
    assert not list(tmp_path.iterdir()), "Airflow made no files"
