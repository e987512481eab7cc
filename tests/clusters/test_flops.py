# SPDX-License-Identifier: Apache-2.0
"""FLOPs and bytes of one token, against formulas and against published utilisations."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
from deepspeed_provider.clusters import flops
from deepspeed_provider.clusters.gpus import gpu
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import parse_options
from deepspeed_provider.sizing.weights import weights

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benches.measurements import DATA, known_to_fit  # noqa: E402

LLAMA = architecture(model_config("meta-llama/Meta-Llama-3-8B"))
MIXTRAL = architecture(model_config("mistralai/Mixtral-8x7B-v0.1"))
# Llama 3 8B: 32 layers of 4096 wide, keys and values of 1024, MLP of 14336, 128256 tokens.
LAYERS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
HEAD = 128256 * 4096
ATTENTION = 12 * 32 * 4096 * 2048
ADAPTERS = 16 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))


def work(model=LLAMA, **values):
    options = parse_options({"sequence_length": 2048, "gradient_checkpointing": False, **values})
    return flops.token_work(model, weights(model, options), options)


def test_weights_that_a_token_meets():
    assert flops.layer_weights(LLAMA) == LAYERS
    assert flops.head_weights(LLAMA) == HEAD
    assert flops.attention_flops(LLAMA, 2048) == ATTENTION


@pytest.mark.parametrize(
    ("values", "model_flops", "matmul_flops", "attention_flops"),
    [
        ({}, 6 * (LAYERS + HEAD) + ATTENTION, 6 * (LAYERS + HEAD), ATTENTION),
        (
            {"gradient_checkpointing": True},
            6 * (LAYERS + HEAD) + ATTENTION,
            8 * LAYERS + 6 * HEAD,
            ATTENTION * 4 / 3,
        ),
        (
            {"method": "lora"},
            4 * (LAYERS + HEAD) + 6 * ADAPTERS + ATTENTION,
            4 * (LAYERS + HEAD) + 6 * ADAPTERS,
            ATTENTION,
        ),
        (
            {"method": "qlora", "gradient_checkpointing": True},
            4 * (LAYERS + HEAD) + 6 * ADAPTERS + ATTENTION,
            6 * LAYERS + 4 * HEAD + 8 * ADAPTERS,
            ATTENTION * 4 / 3,
        ),
    ],
    ids=["full", "checkpointing", "lora", "qlora with checkpointing"],
)
def test_flops_of_a_token(values, model_flops, matmul_flops, attention_flops):
    found = work(**values)
    assert found.model_flops == pytest.approx(model_flops)
    assert found.matmul_flops == pytest.approx(matmul_flops)
    assert found.attention_flops == pytest.approx(attention_flops)


def test_of_experts_only_those_a_token_is_sent_to():
    # Embeddings and norms multiply nothing.
    looked_up = MIXTRAL.token_embedding_parameters
    assert flops.layer_weights(MIXTRAL) + flops.head_weights(MIXTRAL) == pytest.approx(
        MIXTRAL.active_parameters - looked_up, rel=1e-4
    )
    idle = MIXTRAL.parameters - MIXTRAL.active_parameters
    assert idle > 0.7 * MIXTRAL.parameters


def test_activations_grow_with_recomputation_and_adapters():
    plain, again, lora = work(), work(gradient_checkpointing=True), work(method="lora")
    per_layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert plain.activation_elements == 32 * per_layer
    assert again.activation_elements == pytest.approx(plain.activation_elements * 4 / 3)
    assert lora.activation_elements == 32 * (2 * per_layer + 7 * 2 * 16)
    assert plain.scores == 32 * 32 * 2048


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ({}, LLAMA.parameters * (2 * 2 + 2 * 2)),
        ({"gradient_checkpointing": True}, LLAMA.parameters * (3 * 2 + 2 * 2)),
        ({"method": "lora"}, LLAMA.parameters * 2 * 2 + ADAPTERS * (2 * 4 + 2 * 4)),
        (
            {"method": "qlora", "upcast_unquantized": False},
            LAYERS * 2 * (0.5 + 2 + 2) + (LLAMA.parameters - LAYERS) * 2 * 2 + ADAPTERS * (2 * 4 + 2 * 4),
        ),
    ],
    ids=["full", "checkpointing", "lora", "qlora"],
)
def test_bytes_of_weights_in_a_micro_step(values, size):
    # Without ZeRO, PEFT's adapters are fp32.
    options = parse_options({"gradient_checkpointing": False, **values})
    assert flops.weight_bytes_moved(weights(LLAMA, options), options) == pytest.approx(size)


def test_published_utilisations_follow():
    """The table's own utilisation is its tokens per second times our FLOPs of a token, over its peak."""
    with (DATA / "mpt_throughput.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    for row, (model, options, _) in zip(rows, known_to_fit(), strict=True):
        found = flops.token_work(model, weights(model, options), options)
        peak = gpu({"a100_40gb": "A100-40GB", "a100_80gb": "A100-80GB", "h100_80gb": "H100"}[row["gpu"]])
        flops_per_second = peak.dense_flops_16bit * (2 if row["precision"] == "amp_fp8" else 1)
        mfu = 100 * float(row["tokens_s_gpu"]) * found.model_flops / flops_per_second
        # Theirs counts learned positions as if they were multiplied with, which weighs most in small models.
        positions = 6 * model.position_rows * model.hidden_size
        theirs = mfu * (found.model_flops + positions) / found.model_flops
        assert theirs == pytest.approx(float(row["mfu_pct"]), rel=0.01), row
