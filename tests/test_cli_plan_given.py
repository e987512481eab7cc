# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider plan --gpu``: settings for hardware that is there."""

from __future__ import annotations

import re
from functools import partial

import command_line
import pytest
from deepspeed_provider.cli_options import flag
from deepspeed_provider.clusters.engine_settings import with_buckets
from deepspeed_provider.clusters.given import Fitted, fit
from deepspeed_provider.clusters.gpus import GIB, gpu
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Job
from deepspeed_provider.deepspeed_config.check import check
from deepspeed_provider.deepspeed_config.findings import Facts, Severity
from deepspeed_provider.requested.given import GIVEN_OPTIONS, SEARCH_OPTIONS
from deepspeed_provider.requested.plan import JOB_OPTIONS, KEYS
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import Method, TrainingOptions

SEVEN_B = ("--model", "llama-2-7b-hf", "--method", "lora", "--tokens", "50M")
SERVER = ("--gpu", "A10G", "--gpus-per-node", "4")


run = partial(command_line.run, "plan")
as_json = partial(command_line.as_json, "plan")


class TestJson:
    @pytest.mark.parametrize(
        ("words", "described"),
        [
            ([], {}),
            (["--nodes", "2"], {"nodes": 2}),
            (["--nodes", "2", "--interconnect-gbps", "10"], {"nodes": 2, "interconnect_gbps": 10.0}),
            (["--ram-gib", "96", "--nvme-gib", "900"], {"ram_bytes_per_node": 96, "nvme_bytes_per_node": 900}),
        ],
        ids=["one node", "two nodes", "a slow network", "memory and drives"],
    )
    @pytest.mark.parametrize("method", ["lora", "full"])
    def test_the_settings_are_those_that_fit(self, method, words, described):
        model = architecture(model_config("llama-2-7b-hf"))
        options = with_buckets(model, TrainingOptions(method=method))
        job = Job(architecture=model, options=options, tokens=50_000_000, effective_batch_size=64)
        sized = {name: value * GIB if "bytes" in name else value for name, value in described.items()}
        found = fit(job, Hardware.given(gpu=gpu("A10G"), gpus_per_node=4, **sized))
        fits = isinstance(found, Fitted)
        asked = ["--model", "llama-2-7b-hf", "--method", method, "--tokens", "50M"]
        said = as_json(*asked, *SERVER, *words, exit_code=0 if fits else 1)
        if not fits:
            assert said["nearest_miss"]["reason"] == str(found)
            return
        settings = said["chosen"]["settings"]
        assert settings == {name: getattr(found.options, name) for name in settings}
        assert said["chosen"]["hours"] == pytest.approx(found.hours, abs=1e-4)
        assert said["chosen"]["memory"]["gpu_bytes"] == found.memory.gpu.total_bytes

    def test_its_keys_are_those_of_a_search(self):
        given = as_json(*SEVEN_B, *SERVER)
        sought = as_json(*SEVEN_B, "--node-type", "g5.12xlarge", "--max-nodes", "1", "--objective", "time")
        assert list(given) == list(sought)
        assert given["chosen"]["settings"] == sought["chosen"]["settings"]
        assert given["deepspeed_config"] == sought["deepspeed_config"]
        assert given["candidates"] == given["rejected"] == given["would_fit"] == []
        assert given["cluster"] is given["nearest_miss"] is given["objective"] is None

    def test_the_configuration_is_right_for_it(self):
        said = as_json(*SEVEN_B, *SERVER, "--nodes", "2")
        config = said["deepspeed_config"]
        assert config["train_batch_size"] == 64
        assert said["chosen"]["gpus"] == 8
        found = check(config, Facts(world_size=8, method=Method.LORA, use_gpu=True, bf16=True))
        assert not [one for one in found if one.severity is Severity.ERROR]

    def test_a_price(self):
        free, paid = as_json(*SEVEN_B, *SERVER)["chosen"], as_json(*SEVEN_B, *SERVER, "--usd-per-hour", "5")["chosen"]
        assert free["usd"] is free["usd_per_hour"] is None
        assert paid["usd_per_hour"] == 5
        assert paid["usd"] == pytest.approx(5 * paid["hours"], abs=1e-3)

    def test_what_was_not_said_is_assumed_aloud(self):
        text = " ".join(as_json(*SEVEN_B, *SERVER, "--nodes", "2")["assumptions"])
        for name in ("(ram_gib)", "(nvme_gib)", "(interconnect_gbps)"):
            assert name in text
        words = ["--nodes", "2", "--ram-gib", "192", "--nvme-gib", "3000", "--interconnect-gbps", "40"]
        assert "_g" not in " ".join(as_json(*SEVEN_B, *SERVER, *words)["assumptions"])
        assert "interconnect_gbps" not in " ".join(as_json(*SEVEN_B, *SERVER)["assumptions"])

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--method", "qlora", *SERVER], "peft and bitsandbytes"),
            (["--method", "full", *SERVER], "was not measured: time and price"),
            (["--optimizer", "adamw-8bit", "--gpu", "H200", "--gpus-per-node", "8"], "never adamw-8bit"),
        ],
        ids=["packages", "offload", "optimizer"],
    )
    def test_warnings(self, words, said):
        assert said in " ".join(as_json("--model", "llama-2-7b-hf", "--tokens", "50M", *words)["warnings"])

    def test_nvme_wants_its_library(self):
        words = ["--model", "llama-2-7b-hf", "--method", "full", "--tokens", "1M", "--gpu", "A10G"]
        words += ["--gpus-per-node", "1", "--ram-gib", "64", "--nvme-gib", "900"]
        said = as_json(*words)
        assert said["chosen"]["settings"]["offload_device"] == "nvme"
        assert "libaio" in " ".join(said["warnings"])


class TestForAPerson:
    def test_settings_bars_and_hours(self):
        exact, said = as_json(*SEVEN_B, *SERVER)["chosen"], run(*SEVEN_B, *SERVER).output
        assert "Chosen for 1 x 4 A10G: bf16, ZeRO " in said
        assert f"{exact['throughput']['tokens_per_second']:,.0f} tokens/s" in said
        assert f", {exact['hours']:,.1f} h. It fills" in said
        assert re.search(r"each GPU +[\d.]+ +[\d.]+ +━+", said)
        assert "Candidates" not in said
        assert "Not chosen" not in said

    def test_a_price(self):
        exact = as_json(*SEVEN_B, *SERVER, "--usd-per-hour", "5")["chosen"]
        assert f", ${exact['usd']:,.2f} at $5.00 an hour" in run(*SEVEN_B, *SERVER, "--usd-per-hour", "5").output

    def test_what_is_missing(self):
        words = ["--model", "llama-2-7b-hf", "--tokens", "1M", "--gpu", "T4", "--gpus-per-node", "1", "--ram-gib", "32"]
        result = run(*words)
        assert result.exit_code == 1
        assert "Nothing fits 1 x 1 T4." in result.output
        assert re.search(r"Nearest: [\d.]+ GiB of (GPU|host) memory too little at best", result.output)
        said = as_json(*words, exit_code=1)
        assert said["chosen"] is said["deepspeed_config"] is said["cluster"] is None
        assert said["nearest_miss"]["missing_bytes"] > 0

    def test_a_narrow_terminal(self):
        said = run(*SEVEN_B, *SERVER, columns=80).output
        assert all(len(line) <= 80 for line in said.splitlines())
        assert "…" not in said


WRONG = {
    "no GPU": ([*SEVEN_B, "--gpus-per-node", "4"], ["--gpu: is missing"]),
    "no number of GPUs": ([*SEVEN_B, "--gpu", "A10G"], ["--gpus-per-node: is missing"]),
    "a name of several": ([*SEVEN_B, "--gpu", "A100", "--gpus-per-node", "8"], ["--gpu 'A100'", "A100-80GB"]),
    "does not divide": ([*SEVEN_B, "--gpu", "A10G", "--gpus-per-node", "6"], ["does not divide over 6 GPUs", "60 or"]),
    "flash": (
        [*SEVEN_B, "--gpu", "T4", "--gpus-per-node", "4", "--attention", "flash"],
        ["--attention 'flash': its kernels are for Ampere and later, which T4 is not. Use sdpa."],
    ),
    "all at once": (
        [
            *["--model", "gpt-2-large", "--tokens", "x", "--gpu", "A11", "--gpus-per-node", "0", "--nodes", "1.5"],
            *["--ram-gib", "much", "--nvme-gib", "-1", "--interconnect-gbps", "nan", "--usd-per-hour", "-5"],
            *["--cloud", "aws", "--spot", "--all", "--tags", "a=b"],
        ],
        [
            *["--model 'gpt-2-large'", "--tokens 'x'", "--gpu 'A11'", "--gpus-per-node '0'", "--nodes '1.5'"],
            *["--ram-gib 'much'", "--nvme-gib '-1'", "--interconnect-gbps 'nan'", "--usd-per-hour '-5'"],
            *["--cloud 'aws': is for machines", "--spot: is for", "--all: is for", "--tags 'a=b': is for"],
        ],
    ),
}


class TestWhatIsWrong:
    @pytest.mark.parametrize(("words", "said"), WRONG.values(), ids=WRONG)
    def test_every_problem_is_named(self, words, said):
        result = run(*words)
        assert result.exit_code == 2
        assert not result.stdout
        for text in said:
            assert text in result.stderr

    @pytest.mark.parametrize("name", SEARCH_OPTIONS)
    def test_nothing_of_a_search_goes_with_it(self, name):
        value = [] if name in ("spot", "all") else ["8"]
        problems = as_json(*SEVEN_B, *SERVER, flag(name), *value, exit_code=2)["error"]["problems"]
        assert [one["field"] for one in problems] == [name]
        assert "the hardware is given" in problems[0]["problem"]


def test_every_option_is_of_one_kind():
    what = {"model", "parameters", "tokens", "rows", "effective_batch_size", *JOB_OPTIONS}
    assert {*SEARCH_OPTIONS} - {"all"} == {*KEYS} - what
    assert not {*GIVEN_OPTIONS} & {*KEYS}
    said = run("--help", columns=200).output
    assert "Hardware that is there" in said
    for name in GIVEN_OPTIONS:
        assert flag(name) in said
