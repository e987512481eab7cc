# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider estimate --gpu``: whether it fits, and how fast it goes."""

from __future__ import annotations

import json
from functools import partial

import command_line
import pytest
from deepspeed_provider.clusters.gpus import gpu, gpus
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.throughput import throughput
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import parse_options

LLAMA = architecture(model_config("llama-2-7b-hf"))


run = partial(command_line.run, "estimate", columns=120)
as_json = partial(command_line.as_json, "estimate", "--model", "llama-2-7b-hf")


@pytest.mark.parametrize("nodes", [1, 2], ids=["one node", "two nodes"])
@pytest.mark.parametrize("gbps", [None, 25.0], ids=["usual network", "slow network"])
def test_it_is_the_throughput_of_these_settings(nodes, gbps):
    words = ["--gpu", "a100_80gb", "--zero-stage", "3", "--gpus-per-node", "8", "--nodes", str(nodes)]
    said = as_json(*words, *(["--interconnect-gbps", str(gbps)] if gbps else []))
    options = parse_options({"zero_stage": 3, "gpus_per_node": 8, "nodes": nodes})
    hardware = Hardware.given(gpu=gpu("A100-80GB"), gpus_per_node=8, nodes=nodes, interconnect_gbps=gbps)
    found = throughput(LLAMA, options, hardware)
    assert said["throughput"] == {
        "tokens_per_second": found.tokens_per_second,
        "tokens_per_second_per_gpu": found.tokens_per_second_per_gpu,
        "mfu": found.mfu,
        "bound_by": found.bound_by.value,
    }


def test_nothing_about_speed_without_a_gpu():
    assert not {"throughput", "fits"} & set(as_json())


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        (["--gpu", "T4", "--precision", "fp16"], "no"),
        (["--gpu", "H200"], "yes"),
        (["--gpu", "A10G", "--method", "qlora"], "yes"),
    ],
    ids=["T4", "H200", "QLoRA on A10G"],
)
def test_whether_it_fits(words, fits):
    said = as_json(*words)
    assert said["fits"] == fits
    line = next(line for line in run("--model", "llama-2-7b-hf", *words).output.splitlines() if words[1] in line)
    assert ("does not fit" in line) == (fits == "no")


def test_for_a_person():
    said = run("--model", "llama-2-7b-hf", "--gpu", "H100", "--gpus-per-node", "8", "--zero-stage", "3").output
    assert "GiB on each H100: fits" in said
    assert "tokens/s" in said
    assert "bound by" in said


def test_bf16_on_a_gpu_without_it_is_warned_of():
    assert any("T4 does not compute in bf16" in text for text in as_json("--gpu", "T4")["warnings"])
    assert not any("bf16:" in text for text in as_json("--gpu", "T4", "--precision", "fp16")["warnings"])


@pytest.mark.parametrize("found", gpus(), ids=lambda found: found.name)
def test_every_gpu_of_the_catalogue(found):
    assert as_json("--gpu", found.name, "--method", "lora")["throughput"]["tokens_per_second"] > 0


def test_in_a_batch():
    line = {"model": "gpt2", "gpu": "L4", "interconnect_gbps": 50, "nodes": 2}
    wrong = {"model": "gpt2", "gpu": 4, "interconnect_gbps": True}
    result = run("--batch", "-", stdin=f"{json.dumps(line)}\n{json.dumps(wrong)}\n")
    good, bad = map(json.loads, result.stdout.splitlines())
    assert set(good["throughput"]) == {"tokens_per_second", "tokens_per_second_per_gpu", "mfu", "bound_by"}
    assert {problem["field"] for problem in bad["error"]["problems"]} == {"gpu", "interconnect_gbps"}


WRONG = {
    "unknown": (["--gpu", "A1000"], "--gpu 'A1000': is not in the GPU catalogue"),
    "one of several": (["--gpu", "A100"], "A100-40GB, A100-80GB"),
    "no gpu": (["--interconnect-gbps", "100"], "--interconnect-gbps '100': says nothing without a GPU"),
    "not a number": (["--gpu", "T4", "--interconnect-gbps", "fast"], "is no rate in Gbit/s"),
    "nothing": (["--gpu", "T4", "--interconnect-gbps", "0"], "--interconnect-gbps '0'"),
    "not finite": (["--gpu", "T4", "--interconnect-gbps", "nan"], "--interconnect-gbps 'nan'"),
}


@pytest.mark.parametrize(("words", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong(words, said):
    result = run("--model", "gpt2", "--nodes", "0", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "--nodes '0'" in result.stderr, "all problems together"


def test_the_largest_options_are_answered():
    words = [word for name in ("nodes", "gpus-per-node", "micro-batch-size") for word in (f"--{name}", str(10**14))]
    assert as_json("--gpu", "T4", *words)["throughput"]["tokens_per_second"] > 0
