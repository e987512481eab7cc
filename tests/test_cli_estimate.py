# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider estimate``: tables, JSON, formulas, batches, and all that a user can get wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import command_line
import pytest
from deepspeed_provider.cli import app
from deepspeed_provider.cli_options import HELP, choices, flag
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.estimate import estimate
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import TrainingOptions, parse_options
from typer.testing import CliRunner

COMMAND = [sys.executable, "-m", "deepspeed_provider.cli", "estimate"]


run = partial(command_line.run, "estimate", columns=120)
as_json = partial(command_line.as_json, "estimate")


WAYS = {
    "full": ([], {}),
    "zero 3 on two nodes": (
        ["--zero-stage", "3", "--gpus-per-node", "8", "--nodes", "2", "--micro-batch-size", "4"],
        {"zero_stage": 3, "gpus_per_node": 8, "nodes": 2, "micro_batch_size": 4},
    ),
    "offload to nvme": (
        ["--zero-stage", "3", "--offload", "all", "--offload-device", "nvme", "--gpus-per-node", "4"],
        {"zero_stage": 3, "offload": "all", "offload_device": "nvme", "gpus_per_node": 4},
    ),
    "offload to cpu": (
        ["--zero-stage", "2", "--offload", "optimizer", "--load-in-turn", "--no-overlap-comm"],
        {"zero_stage": 2, "offload": "optimizer", "load_in_turn": True, "overlap_comm": False},
    ),
    "lora": (
        ["--method", "lora", "--lora-rank", "64", "--lora-targets", "q,v", "--lora-dropout", "0.1"],
        {"method": "lora", "lora_rank": 64, "lora_targets": ["q", "v"], "lora_dropout": 0.1},
    ),
    "qlora": (
        ["--method", "qlora", "--no-double-quant", "--no-gradient-checkpointing", "--quant-storage", "bf16"],
        {"method": "qlora", "double_quant": False, "gradient_checkpointing": False, "quant_storage": "bf16"},
    ),
    "all of the rest": (
        [
            *["--precision", "pure-bf16", "--optimizer", "paged-adamw-8bit", "--attention", "flash", "--loss", "fused"],
            *["--sequence-length", "4096", "--gradient-accumulation-steps", "8", "--gradient-checkpointing"],
            *["--reduce-bucket-size", "1000000", "--no-upcast-unquantized", "--adapter-precision", "bf16"],
        ],
        {
            **{"precision": "pure-bf16", "optimizer": "paged-adamw-8bit", "attention": "flash", "loss": "fused"},
            **{"sequence_length": 4096, "gradient_accumulation_steps": 8, "gradient_checkpointing": True},
            **{"reduce_bucket_size": 1_000_000, "upcast_unquantized": False, "adapter_precision": "bf16"},
        },
    ),
}


class TestJson:
    @pytest.mark.parametrize(("words", "options"), WAYS.values(), ids=WAYS)
    def test_it_is_the_estimate_of_these_options(self, words, options):
        said = as_json("--model", "llama-2-7b-hf", *words)
        found = estimate(architecture(model_config("llama-2-7b-hf")), parse_options(options))
        assert said["model"] == "llama-2-7b-hf"
        assert said["parameters"]["total"] == 6_738_415_616
        assert said["parameters"]["trainable"] == found.parameters.trainable
        assert said["gpu"]["total_bytes"] == found.gpu.total_bytes == sum(said["gpu"]["parts"].values())
        assert said["gpu"]["allocated_bytes"] == found.gpu.allocated_bytes
        assert said["gpu"]["reserved_bytes"] == found.gpu.reserved_bytes
        assert said["gpu"]["peak_at"] == found.gpu.peak_at
        for store in ("host", "nvme"):
            assert said[store]["total_bytes"] == getattr(found, store).total_bytes == sum(said[store]["parts"].values())
        assert said["assumptions"] == list(found.assumptions)
        assert said["warnings"] == list(found.warnings)

    def test_these_keys_and_no_others(self):
        said = as_json("--model", "gpt2")
        assert set(said) == {"model", "parameters", "gpu", "host", "nvme", "assumptions", "warnings"}
        assert set(said["gpu"]) == {"total_bytes", "allocated_bytes", "reserved_bytes", "peak_at", "parts"}
        assert set(said["host"]) == {"total_bytes", "parts", "peak_at", "at_other_moments"}
        assert set(said["nvme"]) == {"total_bytes", "parts"}
        assert said["nvme"] == {"total_bytes": 0, "parts": {}}

    def test_with_explanations(self):
        said = as_json("--model", "gpt2", "--explain")
        assert set(said["gpu"]["explained"]) == set(said["gpu"]["parts"])
        assert "P = 124,439,808" in said["gpu"]["explained"]["weights"]["formula"]
        assert said["gpu"]["explained"]["weights"]["numbers"]["P"] == 124_439_808
        assert said["gpu"]["explained"]["weights"]["source"]

    def test_a_path_and_a_count_in_place_of_a_name(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(model_config("gpt2")))
        assert as_json("--model", str(tmp_path))["parameters"]["total"] == 124_439_808
        for count in ("7B", "7e9", "7000000000"):
            said = as_json("--parameters", count, "--method", "lora")
            assert said["parameters"]["total"] == 7_000_000_000
            assert "Only the parameter count" in said["warnings"][0]


class TestForAPerson:
    def test_sizes_with_bars_largest_first(self):
        said = run("--model", "llama-2-7b-hf", "--method", "qlora").output
        exact = as_json("--model", "llama-2-7b-hf", "--method", "qlora")
        rows = re.findall(r"^ ?([a-z_0-9]+) +([\d.,]+) +([\d.]+)%(.*)$", said.partition("allocated")[0], re.MULTILINE)
        sizes = sorted(exact["gpu"]["parts"].items(), key=lambda item: -item[1])
        assert [row[0] for row in rows] == [name for name, _ in sizes]
        assert [row[1] for row in rows] == [f"{size / 2**30:,.2f}" for _, size in sizes]
        bars = [row[3].count("━") for row in rows]
        assert bars == sorted(bars, reverse=True)
        assert bars[0] > 0
        for name in ("allocated", "reserved", "total"):
            gib = f"{exact['gpu'][f'{name}_bytes'] / 2**30:,.2f}"
            assert re.search(rf"^ ?{name} .*{re.escape(gib)}", said, re.MULTILINE), said
        assert "6,738,415,616" in said
        assert "Host memory of one node" in said
        assert "NVMe" not in said

    def test_nvme_only_where_something_goes_there(self):
        words, _ = WAYS["offload to nvme"]
        assert "NVMe of one node" in run("--model", "gpt2", *words).output

    def test_what_the_host_holds_only_when_it_needs_less(self):
        words = ("--model", "llama-2-7b-hf", "--zero-stage", "3", "--offload", "optimizer")
        said = run(*words).output
        assert "Host memory of one node, at its peak: training" in said
        assert "Not at that moment, and not in the total: checkpoint_loading 12.55 GiB" in said
        host = as_json(*words)["host"]
        assert host["peak_at"] == "training"
        assert host["at_other_moments"] == {"checkpoint_loading": 13_476_831_232}
        assert host["total_bytes"] == sum(host["parts"].values())

    def test_assumptions_and_warnings_are_seen(self):
        said = run("--model", "gpt2", "--sequence-length", "4096").output
        assert "Assumptions" in said
        assert "Warnings" in said
        assert "beyond the 1,024 positions" in said

    def test_every_part_is_explained(self):
        words = ("--model", "llama-2-7b-hf", "--zero-stage", "3", "--gpus-per-node", "8")
        said = run(*words, "--explain").output
        for store in ("gpu", "host"):
            for name, size in as_json(*words)[store]["parts"].items():
                assert f"{name} = {size:,} bytes" in said
        assert "w * (P + padding) / N [w = 2, P = 6,738,415,616, padding = 0, N = 8]" in said
        assert "Source: Rajbhandari et al. 2020" in said

    def test_a_terminal_that_knows_ascii_only(self):
        done = subprocess.run(
            [*COMMAND, "--model", "gpt2", "--explain"],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "100"},
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert b"weights" in done.stdout


class TestOptions:
    def test_each_field_has_a_help_text_and_a_panel(self):
        listed = [name for fields in HELP.values() for name in fields]
        assert sorted(listed) == sorted(TrainingOptions.model_fields)
        said = run("--help").output
        for panel in ("Model", "Output", *HELP):
            assert f"─ {panel} ─" in said
        assert "(default: 2048)" in said

    def test_a_narrow_terminal_shows_every_name(self):
        shown = CliRunner().invoke(app, ["estimate", "--help"], env={"COLUMNS": "80"}).output
        assert {flag(name) for name in TrainingOptions.model_fields} <= set(
            re.findall(r"--[a-z0-9-]+(?![a-z0-9…-])", shown)
        )

    @pytest.mark.parametrize("name", TrainingOptions.model_fields)
    def test_each_field_is_an_option_that_does_something(self, name):
        field = TrainingOptions.model_fields[name]
        if isinstance(field.default, bool) or bool in get_args(field.annotation):
            words = [flag(name)]
        elif choices(field):
            words = [flag(name), choices(field)[0]]
        else:
            words = [flag(name), {"lora_targets": "q", "lora_dropout": "0.5"}.get(name, "1")]
        assert run("--model", "llama-2-7b-hf", *words).exit_code == 0
        wrong = run("--model", "llama-2-7b-hf", *words[:1], "never so") if len(words) == 2 else None
        if name == "lora_targets":
            wrong = run("--model", "llama-2-7b-hf", "--method", "lora", *words[:1], "never so")
        if wrong is not None:
            assert wrong.exit_code == 2
            assert f"{flag(name)} 'never so'" in wrong.stderr or f"{flag(name)} ['never so']" in wrong.stderr


WRONG = {
    "nothing": ([], ["--model: is missing"]),
    "model and count": (["--model", "gpt2", "--parameters", "7B"], ["--parameters '7B': a model has its own count"]),
    "near name": (["--model", "llama-2-7b-hff"], ["meta-llama/Llama-2-7b-hf"]),
    "no file": (["--model", "./no.json"], ["--model './no.json': there is no such file"]),
    "count": (["--parameters", "7G"], ["--parameters '7G': is no parameter count", "7B"]),
    "a small count": (["--parameters", "5K"], ["--parameters 5000: ", "1000000"]),
    "choice": (["--model", "gpt2", "--method", "qora"], ["--method 'qora'", "full, lora, qlora", "mean 'qlora'"]),
    "number": (["--model", "gpt2", "--nodes", "two"], ["--nodes 'two'"]),
    "negative": (["--model", "gpt2", "--nodes", "-1"], ["--nodes '-1'"]),
    "not finite": (["--model", "gpt2", "--nodes", "nan", "--lora-dropout", "inf"], ["--nodes 'nan'", "--lora-dropout"]),
    "huge": (["--model", "gpt2", "--nodes", "9" * 5000], ["--nodes '999", "is too large"]),
    "together": (["--model", "gpt2", "--offload", "all"], ["--offload 'all'", "zero_stage 3"]),
    "targets": (["--model", "gpt2", "--method", "lora", "--lora-targets", "zz"], ["--lora-targets 'zz'", "c_attn"]),
    "all at once": (
        ["--model", "gpt-2-large", "--method", "loar", "--zero-stage", "7", "--lora-rank", "0", "--attention", "fast"],
        ["--model", "gpt2-large", "--method 'loar'", "--zero-stage '7'", "--lora-rank '0'", "--attention 'fast'"],
    ),
    "targets beside others": (
        ["--model", "gpt2", "--method", "lora", "--lora-targets", "zz", "--zero-stage", "7", "--nodes", "0"],
        ["--lora-targets 'zz'", "--zero-stage '7'", "--nodes '0'"],
    ),
    "no batch": (["--batch", "/no/such/file"], ["--batch '/no/such/file': cannot be read (No such file"]),
    "a folder as batch": (["--batch", "/"], ["--batch '/': cannot be read (Is a directory"]),
    "options beside a batch": (
        ["--batch", "-", "--model", "gpt2", "--nodes", "2"],
        ["--model 'gpt2': --batch takes it from the file", "--nodes '2'"],
    ),
    "no such option": (["--model", "gpt2", "--zero-stag", "1"], ["--zero-stage"]),
}


class TestWhatIsWrong:
    @pytest.mark.parametrize(("words", "said"), WRONG.values(), ids=WRONG)
    def test_every_problem_is_named(self, words, said):
        result = run(*words)
        assert result.exit_code == 2
        assert not result.stdout
        for text in said:
            assert text in result.stderr

    def test_problems_of_the_config_and_the_options_together(self, tmp_path):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(model_config("llama-2-7b-hf") | {"hidden_size": -1, "vocab_size": "many"}))
        result = run("--model", str(file), "--nodes", "0")
        assert result.exit_code == 2
        for text in ("config, hidden_size -1", "config, vocab_size 'many'", "--nodes '0'"):
            assert text in result.stderr

    @pytest.mark.parametrize("model_type", ["bert", "t5", "qwen2_vl", "whisper", "mamba"])
    def test_models_that_are_not_sized(self, tmp_path, model_type):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(model_config("llama-2-7b-hf") | {"model_type": model_type}))
        result = run("--model", str(file))
        assert result.exit_code == 2
        assert "is not supported" in result.stderr

    def test_a_program_reads_them_as_json(self):
        result = run("--model", "gpt2", "--nodes", "0", "--method", "lo", "--json")
        assert result.exit_code == 2
        error = json.loads(result.stdout)["error"]
        assert {problem["field"] for problem in error["problems"]} == {"nodes", "method"}
        assert "--nodes '0'" in result.stderr


class TestProcess:
    def test_nothing_heavy_is_loaded(self, tmp_path):
        probe = (
            "import atexit, sys\n"
            "names = lambda: {name.partition('.')[0] for name in sys.modules}\n"
            "atexit.register(lambda: print(*names(), file=sys.stderr))\n"
            "from deepspeed_provider.cli import app\n"
            "app(['estimate', '--model', 'gpt2', '--json'])\n"
        )
        environment = {**os.environ, "AIRFLOW_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, env=environment, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["parameters"]["total"] == 124_439_808
        loaded = set(done.stderr.split())
        assert "deepspeed_provider" in loaded
        assert not loaded & {*command_line.HEAVY, "huggingface_hub"}
        assert not list(tmp_path.iterdir()), "Airflow made no files"

    def test_the_installed_command(self):
        command = Path(sys.executable).with_name("deepspeed-provider")
        done = subprocess.run([command, "estimate", "--parameters", "350M", "--json"], capture_output=True, timeout=60)
        assert json.loads(done.stdout)["parameters"]["total"] == 350_000_000
