# SPDX-License-Identifier: Apache-2.0
"""The estimator's model states and ZeRO buffers, equal to tensors counted in DeepSpeed's own engines.

One torchrun of two ranks (gloo, CPU) starts an engine for each case, another one of one rank for those that
are alone, see ``real_engine.py``. Equal means equal, to the byte, on the fuller rank; only scalars (steps,
norms) are let pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.gpu import parts_by_moment
from deepspeed_provider.sizing.host import host_parts
from deepspeed_provider.sizing.options import TrainingOptions, parse_options
from deepspeed_provider.sizing.weights import weights

RANKS = 2
SCALAR_BYTES = 512
BUCKET = 40_000  # between a layer's matrices and the embeddings: some gradients do not fit in
LORA_RANK = 4
# The vocabulary is odd; each matrix has an even number of elements, so that stage 3 pads none.
MODEL = {
    "vocab_size": 1001,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
ARCHITECTURE = architecture({"model_type": "llama", **MODEL})

CASES: dict[str, dict[str, Any]] = {
    **{
        f"{precision}-stage{stage}": {"precision": precision, "zero_stage": stage}
        for precision in ("fp32", "bf16")
        for stage in range(4)
    },
    "stage1-accumulation": {"zero_stage": 1, "gradient_accumulation_steps": 2},
    "stage2-accumulation": {"zero_stage": 2, "gradient_accumulation_steps": 2},
    "stage2-overlap": {"zero_stage": 2, "overlap_comm": True},
    "stage2-pure-bf16": {"zero_stage": 2, "precision": "pure-bf16"},
    "stage2-lora": {"zero_stage": 2, "method": "lora"},
    "stage3-lora": {"zero_stage": 3, "method": "lora"},
    "stage3-sub-groups": {"zero_stage": 3, "sub_group_size": 60_000},
    "stage3-ahead": {"zero_stage": 3, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 150_000},
    "stage3-reuse": {"zero_stage": 3, "stage3_max_reuse_distance": 400_000, "stage3_prefetch_bucket_size": 0},
    "stage1-offload": {"zero_stage": 1, "offload": "optimizer"},
    "stage2-offload": {"zero_stage": 2, "offload": "optimizer"},
    "stage2-offload-fp32": {"zero_stage": 2, "offload": "optimizer", "precision": "fp32"},
    "stage2-offload-accumulation": {"zero_stage": 2, "offload": "optimizer", "gradient_accumulation_steps": 2},
    "stage3-offload": {"zero_stage": 3, "offload": "optimizer"},
    "stage3-offload-all": {"zero_stage": 3, "offload": "all"},
    **{f"alone-stage{stage}": {"gpus_per_node": 1, "zero_stage": stage} for stage in range(4)},
    "alone-stage0-accumulation": {"gpus_per_node": 1, "gradient_accumulation_steps": 2},
    "alone-stage0-lora": {"gpus_per_node": 1, "method": "lora", "adapter_precision": "bf16"},
    "alone-stage2-offload": {"gpus_per_node": 1, "zero_stage": 2, "offload": "optimizer"},
    "alone-stage3-offload-all": {"gpus_per_node": 1, "zero_stage": 3, "offload": "all"},
}
COMMON = {
    "reduce_bucket_size": BUCKET,
    "stage3_param_persistence_threshold": 960,
    "stage3_prefetch_bucket_size": 9000,
    "gradient_checkpointing": False,
    "gpus_per_node": RANKS,
    "lora_rank": LORA_RANK,
    "sequence_length": 16,
}


STAGE_3_OPTIONS = (
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_max_reuse_distance",
    "stage3_max_live_parameters",
    "sub_group_size",
)


def options_of(case: dict[str, Any]) -> TrainingOptions:
    return parse_options({**COMMON, **case})


def deepspeed_config(options: TrainingOptions) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": options.zero_stage, "reduce_bucket_size": BUCKET}
    zero |= {name: getattr(options, name) for name in STAGE_3_OPTIONS}
    if options.overlap_comm is not None:
        zero["overlap_comm"] = options.overlap_comm
    if options.offloads_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if options.offloads_parameters:
        zero["offload_param"] = {"device": "cpu"}
    pure = options.precision.value == "pure-bf16"
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
        # torch's AdamW steps on the host too: nothing to compile.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "bf16": {
            "enabled": options.precision.value != "fp32",
            **({"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True} if pure else {}),
        },
    }


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> dict[str, list[dict[str, dict[str, int]]]]:
    """By case: what each of its ranks counted, by moment."""
    return {
        name: [of_rank[name] for of_rank in found]
        for ranks in (1, RANKS)
        for found in [run_engines(tmp_path_factory.mktemp(f"engines{ranks}"), ranks)]
        for name in found[0]
    }


def run_engines(scratch: Path, ranks: int) -> list[dict[str, Any]]:
    """What each of so many ranks counted, by case and moment."""
    cases: dict[str, Any] = {}
    for name, case in CASES.items():
        options = options_of(case)
        if options.world_size != ranks:
            continue
        cases[name] = {"deepspeed": deepspeed_config(options)}
        if options.method.value == "lora":
            cases[name]["lora"] = {"r": LORA_RANK, "target_modules": "all-linear"}
    (scratch / "cases.json").write_text(json.dumps({"model": MODEL, "cases": cases}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("real_engine.py")), "cases.json", "counted"],
        cwd=scratch,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return [json.loads((scratch / f"counted{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture
def counted(engines, name) -> dict[str, dict[str, int]]:
    """Of the rank with more: bytes by moment and role."""
    return {
        moment: {role: max(of_rank[moment][role] for of_rank in engines[name]) for role in roles}
        for moment, roles in engines[name][0].items()
    }


def estimated(name: str) -> dict[str, dict[str, int]]:
    """Bytes by moment and part."""
    options = options_of(CASES[name])
    found: dict[str, dict[str, int]] = {}
    for moment, parts in parts_by_moment(ARCHITECTURE, weights(ARCHITECTURE, options), options).items():
        sizes: dict[str, int] = {}
        for part in parts:
            sizes[part.name] = sizes.get(part.name, 0) + part.bytes
        found[moment] = sizes
    return found


def host(name: str) -> dict[str, int]:
    """Bytes by part for one rank."""
    options = options_of(CASES[name])
    parts = host_parts(weights(ARCHITECTURE, options), options)
    return {part.name: part.bytes // options.gpus_per_node for part in parts}


every_case = pytest.mark.parametrize("name", CASES)
offloaded = pytest.mark.parametrize("name", [name for name in CASES if "offload" in name])
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@every_case
def test_weights_and_optimizer_states(counted, name):
    parts = estimated(name)["optimizer step"]
    real = counted["idle"]
    on_host = options_of(CASES[name]).offloads_optimizer
    if not options_of(CASES[name]).offloads_parameters:
        assert parts.get("weights", 0) + parts.get("adapter_weights", 0) == real["weights"]
    assert parts.get("master_weights", 0) == (0 if on_host else real["master_weights"])
    assert parts.get("optimizer_states", 0) == (0 if on_host else real["optimizer_states"])
    assert parts.get("offload_buffer", 0) == real["offload_staging_gpu"]


@every_case
def test_gradients_and_buffers_of_the_backward_pass(counted, name):
    options = options_of(CASES[name])
    parts, real = estimated(name)["first layer"], counted.get("reduced", counted["kept"])
    assert parts["reduce_bucket"] == real["reduce_bucket"]
    assert parts.get("persistent_parameters", 0) == counted["turn"]["persistent_parameters"]
    if options.zero_stage < 2:
        # Reduced only after the backward pass, when all of them are there.
        assert estimated(name)["gradient reduction"]["gradients"] == counted["unreduced"]["gradients"]
    elif not options.offloads_optimizer:
        assert parts["gradients"] == real["gradients"]


@pytest.mark.parametrize("name", [name for name in CASES if options_of(CASES[name]).zero_stage < 2])
def test_the_peak_of_the_reduction(counted, name):
    parts = estimated(name)["gradient reduction"]
    real = counted["reduction_peak"]["all"] - sum(host(name).get(part, 0) for part in OFFLOADED)
    assert sum_of_states(parts) == pytest.approx(real, abs=SCALAR_BYTES)


@every_case
def test_the_peak_of_the_step(counted, name):
    """While gradients are taken the norm of, flattened and cast, whichever needs more."""
    moments, on_host = estimated(name), host(name)
    real = counted["step_peak"]["all"] - sum(on_host.get(part, 0) for part in OFFLOADED)
    peak = max(sum_of_states(moments[moment]) for moment in ("gradient norm", "optimizer step") if moment in moments)
    assert peak == pytest.approx(real, abs=SCALAR_BYTES)


@pytest.mark.parametrize("name", [name for name in CASES if options_of(CASES[name]).zero_stage >= 2])
def test_gradients_normed_on_their_way_to_the_host(counted, name):
    """In double precision, from stage 2 on in the backward pass; what stays on the GPU is normed before the step."""
    parts = estimated(name).get("embedding reduced", {})
    assert parts.get("gradient_in_double", 0) == pytest.approx(counted["backward"]["double"], abs=8)
    assert ("gradient_in_double" in parts) is options_of(CASES[name]).offloads_optimizer


@pytest.mark.parametrize("name", ["stage3-ahead", "stage3-reuse"])
def test_gathered_parameters_at_the_turn(counted, name):
    """Whole tensors are gathered and released: up to one more, or less, of a layer."""
    tensor = 2 * MODEL["hidden_size"] * MODEL["intermediate_size"]
    part = estimated(name)["first layer"]["gathered_parameters"]
    assert part == pytest.approx(counted["turn"]["gathered_parameters"], abs=tensor)


OFFLOADED = ("offloaded_optimizer", "offloaded_parameters", "offload_buffers")


def sum_of_states(parts: dict[str, int]) -> int:
    """Without what the CPU run does not have, or what is not there before the wrapped optimizer's step."""
    return sum(size for part, size in parts.items() if part not in ("cublas_workspace", "optimizer_temporaries"))


@offloaded
def test_host_memory_of_offloaded_states(counted, name):
    options, parts, real = options_of(CASES[name]), host(name), counted["idle"]
    states = real["master_weights"] + real["optimizer_states"] + real["master_gradients"]
    assert parts["offloaded_optimizer"] == states
    buffers = real["offload_weights_host"] + real["offload_staging_host"] + real["offload_accumulated_host"]
    assert parts["offload_buffers"] == (real["gradients"] if options.zero_stage == 3 else buffers)
    assert parts.get("offloaded_parameters", 0) == (real["weights"] if options.offloads_parameters else 0)
