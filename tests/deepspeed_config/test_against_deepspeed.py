# SPDX-License-Identifier: Apache-2.0
"""Generator and checker against the installed DeepSpeed: it takes what they make and accept, in the same meaning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepspeed_provider.deepspeed_config.check import check
from deepspeed_provider.deepspeed_config.findings import Facts, Severity
from deepspeed_provider.deepspeed_config.generate import EngineSettings, deepspeed_config
from deepspeed_provider.deepspeed_config.rules import RULES

from deepspeed_config import HERE, deepspeed_reads, samples, script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

PACKAGED = HERE.parents[1] / "provider/deepspeed_provider/deepspeed_config/data/schema.json"
GENERATED = list(samples.settings(7, 500))
MISTAKEN = [
    (chosen.batch.world_size, samples.mistaken(deepspeed_config(chosen), number))
    for number, chosen in enumerate(samples.settings(11, 3000))
]
ACCEPTED = [(rule.accepted.facts.world_size or 1, dict(rule.accepted.config)) for rule in RULES]

Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def answers() -> tuple[Answers, Answers, Answers]:
    """To generated and mistaken configurations and to the accepted examples; importing DeepSpeed takes longest."""
    generated = [(chosen.batch.world_size, deepspeed_config(chosen)) for chosen in GENERATED]
    found = deepspeed_reads([*generated, *MISTAKEN, *ACCEPTED])
    split = len(GENERATED) + len(MISTAKEN)
    return found[: len(GENERATED)], found[len(GENERATED) : split], found[split:]


def test_the_packaged_schema_is_that_of_the_installed_deepspeed() -> None:
    extracted = json.loads(script("extract_schema.py"))
    packaged = json.loads(PACKAGED.read_text())
    extracted["extracted_on"] = packaged["extracted_on"]
    assert extracted == packaged, "run tests/deepspeed_config/extract_schema.py and look at the difference"


def test_deepspeed_takes_what_is_generated_and_means_the_same(answers: tuple[Answers, ...]) -> None:
    for chosen, answer in zip(GENERATED, answers[0], strict=True):
        assert answer == _meant(chosen)


def _meant(chosen: EngineSettings) -> dict[str, Any]:
    batch, zero = chosen.batch, deepspeed_config(chosen)["zero_optimization"]
    return {
        "batch": [batch.effective_batch_size, batch.micro_batch_size, batch.gradient_accumulation_steps],
        "stage": chosen.zero_stage,
        "clip": chosen.gradient_clipping,
        "untested": True,
        "bf16": chosen.precision == "bf16",
        "fp16": chosen.precision == "fp16",
        "gather": chosen.zero_stage == 3,
        "bucket": zero.get("reduce_bucket_size", 500_000_000),
        "offload_optimizer": chosen.offload_device.value if chosen.offloads_optimizer else None,
        "offload_param": chosen.offload_device.value if chosen.offloads_parameters else None,
    }


def test_what_deepspeed_refuses_the_checker_refuses(answers: tuple[Answers, ...]) -> None:
    """The other way round the checker is stricter: DeepSpeed ignores much."""
    refused = [(case, answer) for case, answer in zip(MISTAKEN, answers[1], strict=True) if "refused" in answer]
    assert len(refused) > 1000
    missed = [
        (answer["refused"][:300], config)
        for (world_size, config), answer in refused
        if not any(one.severity is Severity.ERROR for one in check(config, Facts(world_size=world_size)))
    ]
    assert missed == []


def test_deepspeed_takes_every_accepted_example(answers: tuple[Answers, ...]) -> None:
    refused = {rule.name for rule, answer in zip(RULES, answers[2], strict=True) if "refused" in answer}
    assert refused <= {"auto"}  # only the Hugging Face trainer can read that one


# Rules about which DeepSpeed's class says nothing: the engine refuses, when it starts. Their examples need no GPU
# and nothing that must be compiled.
ENGINE_RULES = (
    *("impossible-loss-scale", "legacy-stage-1", "master-weights-without-offload", "master-weights-without-zero"),
    *("norm-needed", "other-precision", "own-accumulation", "removed-key", "said-twice", "scheduler-parameter"),
    *("tag-validation", "two-precisions", "unknown-dtype", "unknown-key", "untested-optimizer", "warmup-steps"),
)


def test_an_engine_starts_with_the_accepted_and_not_with_the_refused_example() -> None:
    rules = [rule for rule in RULES if rule.name in ENGINE_RULES]
    assert len(rules) == len(ENGINE_RULES)
    examples = [dict(example.config) for rule in rules for example in (rule.accepted, rule.refused)]
    answers = json.loads(script("start_engines.py", json.dumps(examples)).rpartition("FOUND")[2])
    wrong = {
        rule.name: (accepted, refused)
        for rule, accepted, refused in zip(rules, answers[::2], answers[1::2], strict=True)
        if accepted is not None or refused is None
    }
    assert wrong == {}
