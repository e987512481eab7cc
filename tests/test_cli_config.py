# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider config check``: table, JSON, exit status, and files that are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_provider.cli import app
from deepspeed_provider.deepspeed_config.rules import RULES
from typer.testing import CliRunner, Result

GOOD = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}
NVME = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
NVME["offload_param"] = {"device": "nvme", "nvme_path": "/local_disk0/deepspeed"}


def run(*words: str, stdin: str | bytes | None = None) -> Result:
    result = CliRunner().invoke(app, ["config", "check", *words], input=stdin, env={"COLUMNS": "250"})
    assert "Traceback" not in result.output
    return result


def rules(config: dict[str, Any], *words: str) -> list[str]:
    result = run("-", "--json", *words, stdin=json.dumps(config))
    answer = json.loads(result.stdout)
    assert result.exit_code == (1 if answer["errors"] else 0)
    assert answer["errors"] + answer["warnings"] == len(answer["findings"])
    assert answer["deepspeed"] == "0.19.8"
    return [one["rule"] for one in answer["findings"]]


def test_a_good_file_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(GOOD))
    result = run(str(file), "--world-size", "4")
    assert (result.exit_code, result.output) == (0, f"{file}: no problems (DeepSpeed 0.19.8).\n")


def test_a_bad_file_has_a_table(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**GOOD, "train_batch_size": 30, "gradient_cliping": 1.0, "zzz": 1}))
    result = run(str(file), "--world-size", "4")
    assert result.exit_code == 1
    words = " ".join(result.output.replace("│", " ").split())
    for part in (
        "train_batch_size = 30",
        "Use train_batch_size 32",
        "Did you mean 'gradient_clipping'?",
        "foreign-key",
    ):
        assert part in words
    assert result.output.endswith("2 errors, 1 warning (DeepSpeed 0.19.8).\n")


def test_warnings_alone_are_no_failure() -> None:
    result = run("-", stdin=json.dumps({**GOOD, "zzz": 1}))
    assert result.exit_code == 0
    assert "standard input: 0 errors, 1 warning" in result.output
    assert "With --world-size" in result.output


OPTIONS = {
    "nothing told": (GOOD, [], []),
    "ranks": (GOOD, ["--world-size", "3"], ["batch-does-not-fit"]),
    "GPUs without bf16": (GOOD, ["--no-bf16"], ["no-bf16-hardware"]),
    "a model in bf16": (
        {"train_batch_size": 8, "fp16": {"enabled": True}},
        ["--model-precision", "bf16"],
        ["fp16-for-bf16-model"],
    ),
    "on CPU": ({"train_batch_size": 8, "fp16": {"enabled": True}}, ["--cpu"], ["fp16-on-cpu"]),
    "an adapter": (
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000}},
        ["--trained", "40000000"],
        ["odd-size"],
    ),
    "QLoRA": ({"train_batch_size": 8, "zero_optimization": NVME}, ["--method", "qlora"], ["qlora-at-stage-3"]),
    "no disk, no library": (
        {"train_batch_size": 8, "zero_optimization": NVME},
        ["--no-disk", "--no-libaio"],
        ["nvme-without-disk", "nvme-without-libaio"],
    ),
    "the Hugging Face trainer": (
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}},
        ["--launcher", "hf"],
        [],
    ),
}


@pytest.mark.parametrize(("config", "words", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_what_is_told_is_judged(config: dict[str, Any], words: list[str], expected: list[str]) -> None:
    assert rules(config, *words) == expected


UNREADABLE = {
    "empty": (b"", "is not JSON"),
    "a comment": (b'{"train_batch_size": 8 // eight\n}', "is not JSON"),
    "a list": (b"[1]", "holds a JSON list, not an object"),
    "no text": (b"\xff\xfe\x00\x01", "is not JSON"),
    "a key twice": (b'{"bf16": {"enabled": true, "enabled": false}}', "'enabled' is there twice"),
    "no number": (b'{"gradient_clipping": NaN}', "NaN is no JSON number"),
    "beyond floats": (b'{"gradient_clipping": 1e999}', "1e999 is no JSON number"),
    "nested": (b'{"a":' * 200 + b"1" + b"}" * 200, "nested more than 50 levels"),
    "nested beyond the parser": (b"[" * 100_000, "is not JSON"),
}


@pytest.mark.parametrize(("content", "text"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_no_configuration_is_told_in_one_message(content: bytes, text: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(content)
    plain, machine = run(str(file)), run(str(file), "--json")
    assert (plain.exit_code, machine.exit_code) == (2, 2)
    assert text in plain.stderr
    assert len(plain.stderr.splitlines()) == 1
    assert plain.stdout == ""
    (problem,) = json.loads(machine.stdout)["error"]["problems"]
    assert text in problem["problem"]


@pytest.mark.parametrize("path", ["/nowhere/ds.json", "."], ids=["no file", "a folder"])
def test_a_file_that_cannot_be_read(path: str) -> None:
    result = run(path)
    assert result.exit_code == 2
    assert f"FILE '{path}': cannot be read" in result.stderr


def test_an_option_that_means_nothing_is_refused() -> None:
    result = run("-", "--model-precision", "fp8", stdin="{}")
    assert result.exit_code == 2
    assert result.stderr == "--model-precision 'fp8': should be one of fp32, bf16, fp16. Try 'fp32'.\n"


@pytest.mark.parametrize("value", ["0", "-2", "two", "1.5"])
@pytest.mark.parametrize("name", ["--world-size", "--trained"])
def test_a_count_that_is_none(name: str, value: str) -> None:
    result = run("-", name, value, stdin="{}")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{name} '{value}': should be a whole number from 1. ")


def test_all_problems_of_a_request_at_once() -> None:
    words = ["--world-size", "0", "--method", "lorra", "--launcher", "deepspede", "--model-precision", "fp8"]
    result = run("/nowhere", *words, "--json")
    assert result.exit_code == 2
    named = [problem["field"] for problem in json.loads(result.stdout)["error"]["problems"]]
    assert named == ["world-size", "method", "launcher", "model-precision", "FILE"]
    assert "Try 'lora'." in result.stderr
    assert "Try 'deepspeed'." in result.stderr


def test_a_secret_is_not_repeated() -> None:
    config = {"train_batch_size": 8, "comet": {"enabled": True, "api_key": "s3cret"}}
    assert rules(config) == ["secret-in-configuration"]
    for words in ([], ["--json"]):
        assert "s3cret" not in run("-", *words, stdin=json.dumps(config)).output


def test_half_a_letter_is_printed_too() -> None:
    assert run("-", stdin='{"train_batch_size": 8, "\\ud800": 1}').exit_code == 0


def test_the_rules_are_listed() -> None:
    result = CliRunner().invoke(app, ["config", "rules"], env={"COLUMNS": "250"})
    assert result.exit_code == 0
    for rule in RULES:
        assert rule.name in result.output
        assert rule.why in result.output


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(GOOD))
    command = [sys.executable, "-X", "importtime", "-m", "deepspeed_provider.cli", "config", "check", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert not names & {"airflow", "torch", "transformers", "deepspeed", "peft", "mlflow", "pyspark", "pandas"}
