# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider estimate``: tables, JSON, formulas, batches, and all that a user can get wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deepspeed_provider.cli import app
from deepspeed_provider.cli_options import HELP, choices, flag
from deepspeed_provider.cli_request import KEYS
from deepspeed_provider.sizing.catalogue import model_config, model_names
from deepspeed_provider.sizing.estimate import estimate
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import TrainingOptions, parse_options
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

COMMAND = [sys.executable, "-m", "deepspeed_provider.cli", "estimate"]
HEAVY = {"airflow", "torch", "transformers", "deepspeed", "peft", "mlflow", "pyspark", "pandas", "pyarrow"}


def run(*words: str, stdin: str | bytes | None = None) -> Result:
    result = CliRunner().invoke(app, ["estimate", *words], input=stdin, env={"COLUMNS": "120"})
    assert "Traceback" not in result.output
    return result


def as_json(*words: str) -> dict:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def batch(*lines: object) -> tuple[int, list[dict]]:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    result = run("--batch", "-", stdin=text)
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()]


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

    def test_a_line_of_a_batch_is_the_same(self):
        for words, options in WAYS.values():
            _, (line,) = batch({"model": "gpt2", **options})
            assert line == as_json("--model", "gpt2", *words)

    def test_these_keys_and_no_others(self):
        said = as_json("--model", "gpt2")
        assert set(said) == {"model", "parameters", "gpu", "host", "nvme", "assumptions", "warnings"}
        assert set(said["gpu"]) == {"total_bytes", "allocated_bytes", "reserved_bytes", "peak_at", "parts"}
        assert set(said["host"]) == set(said["nvme"]) == {"total_bytes", "parts"}
        assert said["nvme"] == {"total_bytes": 0, "parts": {}}

    def test_with_explanations(self):
        said = as_json("--model", "gpt2", "--explain")
        assert set(said["gpu"]["explained"]) == set(said["gpu"]["parts"])
        assert "P = 124,439,808" in said["gpu"]["explained"]["weights"]["formula"]
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
        assert "w x P / N [w = 2, P = 6,738,415,616, N = 8]" in said
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
        if isinstance(field.default, bool) or name == "overlap_comm":
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


LINES = {
    "numbers as strings": ({"model": "gpt2", "sequence_length": "512", "nodes": 2.0, "double_quant": "no"}, None),
    "a config": ({"model": model_config("gpt2"), "method": "lora", "lora_targets": "q,v"}, None),
    "a count": ({"parameters": "7B"}, None),
    "null is as if not given": ({"model": "gpt2", "parameters": None, "nodes": None}, None),
    "no model": ({"method": "lora"}, {"model"}),
    "unknown keys": ({"model": "gpt2", "modle": 1, "micro-batch-size": 2}, {"modle", "micro-batch-size"}),
    "model and options": ({"model": "gpt3", "nodes": 0, "method": "x"}, {"model", "nodes", "method"}),
    "config and options": ({"model": model_config("gpt2") | {"n_layer": 0}, "nodes": "x"}, {"n_layer", "nodes"}),
    "not finite": ('{"model": "gpt2", "nodes": NaN, "lora_dropout": Infinity}', {"nodes", "lora_dropout"}),
    "huge": ({"model": "gpt2", "nodes": 10**30, "sequence_length": "9" * 40}, {"nodes", "sequence_length"}),
    "lists and objects": ({"model": ["gpt2"], "method": {}, "nodes": []}, {"model", "method", "nodes"}),
    "switches that are none": ({"model": "gpt2", "nodes": True, "overlap_comm": "maybe"}, {"nodes", "overlap_comm"}),
    "a list": ([1], {"line"}),
    "cut short": ('{"model": "gpt2"', {"line"}),
    "too deep": ("[" * 100_000, {"line"}),
}


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["gpt2", "lora", "7B", "q,v", "all", "nvme", "3"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


class TestBatch:
    @pytest.mark.parametrize(("line", "fields"), LINES.values(), ids=LINES)
    def test_one_line(self, line, fields):
        status, (said,) = batch(line)
        if fields is None:
            assert status == 0
            assert said["gpu"]["total_bytes"] == sum(said["gpu"]["parts"].values()) > 0
            return
        assert status == 1
        assert set(said) == {"error", "line"}
        assert {problem["field"] for problem in said["error"]["problems"]} == fields
        for problem in said["error"]["problems"]:
            assert set(problem) == {"field", "value", "problem", "suggestion"}
            assert problem["suggestion"]
            assert problem["field"] in said["error"]["message"]

    def test_nearest_key(self):
        _, (said,) = batch({"model": "gpt2", "modle": 1, "micro-batch-size": 2, "Sequence_Length": 3})
        hints = [problem["suggestion"] for problem in said["error"]["problems"]]
        assert hints == [f"Did you mean {name!r}?" for name in ("model", "micro_batch_size", "sequence_length")]

    def test_in_order_errors_included_blank_lines_skipped(self, tmp_path):
        file = tmp_path / "batch.jsonl"
        good, bad = '{"model": "gpt2"}', '{"model": "gpt2", "nodes": 0}'
        file.write_bytes(f"\ufeff{good}\r\n\n   \n{bad}\n\n{good}".encode() + b"\n\xff\xfe\n" + good.encode())
        result = run("--batch", str(file))
        said = [json.loads(line) for line in result.stdout.splitlines()]
        assert result.exit_code == 1
        assert [line.get("line", line.get("model")) for line in said] == ["gpt2", 4, "gpt2", 7, "gpt2"]

    def test_an_empty_file_is_answered_with_nothing(self):
        assert batch("", "") == (0, [])

    def test_a_long_value_is_cut(self):
        _, (said,) = batch({"model": "x" * 100_000})
        assert len(said["error"]["message"]) < 1000

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), ANYTHING, max_size=5), max_size=20))
    def test_whatever_comes_is_answered(self, lines):
        _, said = batch(*lines)
        assert len(said) == len(lines)
        for answer in said:
            assert "gpu" in answer or answer["error"]["problems"], answer["error"]["message"]


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
        assert not loaded & {*HEAVY, "huggingface_hub"}
        assert not list(tmp_path.iterdir()), "Airflow made no files"

    def test_a_thousand_lines_take_seconds(self):
        names = model_names()
        methods = ("full", "lora", "qlora")
        lines = [
            {"model": names[i % len(names)], "method": methods[i % 3], "sequence_length": 256 + i, "zero_stage": i % 4}
            for i in range(1000)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        started = time.monotonic()
        done = subprocess.run([*COMMAND, "--batch", "-"], input=text, capture_output=True, text=True, timeout=120)
        took = time.monotonic() - started
        said = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 0, next(line for line in said if "error" in line)
        assert [line["model"] for line in said] == [line["model"] for line in lines]
        assert took < 60, "about 2 s on an idle core"

    def test_each_line_is_answered_before_the_next_is_written(self):
        with subprocess.Popen([*COMMAND, "--batch", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as asked:
            for name in ("gpt2", "llama-2-7b-hf"):
                asked.stdin.write(json.dumps({"model": name}).encode() + b"\n")
                asked.stdin.flush()
                assert json.loads(asked.stdout.readline())["model"] == name
            asked.stdin.close()
            assert asked.wait(30) == 0

    def test_a_reader_that_goes_away_is_no_traceback(self, tmp_path):
        file = tmp_path / "batch.jsonl"
        file.write_text('{"model": "gpt2"}\n' * 500)
        with subprocess.Popen(
            [*COMMAND, "--batch", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as asked:
            asked.stdout.readline()
            asked.stdout.close()
            said = asked.stderr.read()
            asked.wait(30)
        assert "Traceback" not in said

    def test_the_installed_command(self):
        command = Path(sys.executable).with_name("deepspeed-provider")
        done = subprocess.run([command, "estimate", "--parameters", "350M", "--json"], capture_output=True, timeout=60)
        assert json.loads(done.stdout)["parameters"]["total"] == 350_000_000
