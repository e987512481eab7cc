# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider estimate --batch``: one process answers many requests, a line each, errors included."""

from __future__ import annotations

import json
import subprocess
import time

import pytest
from deepspeed_provider.requested.estimate import KEYS
from deepspeed_provider.sizing.catalogue import model_config, model_names
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli_estimate import COMMAND, WAYS, as_json, run


def batch(*lines: object) -> tuple[int, list[dict]]:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    result = run("--batch", "-", stdin=text)
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()]


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
    def test_a_line_of_a_batch_is_the_same(self):
        for words, options in WAYS.values():
            _, (line,) = batch({"model": "gpt2", **options})
            assert line == as_json("--model", "gpt2", *words)

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

    @settings(max_examples=15)
    @given(st.lists(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), ANYTHING, max_size=5), max_size=20))
    def test_whatever_comes_is_answered(self, lines):
        _, said = batch(*lines)
        assert len(said) == len(lines)
        for answer in said:
            assert "gpu" in answer or answer["error"]["problems"], answer["error"]["message"]


class TestProcess:
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
