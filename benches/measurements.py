# SPDX-License-Identifier: Apache-2.0
"""Published measurements of GPU memory, as options of the estimator: what each row says of itself.

Nothing here corrects an estimate. A row's options are those that its source states, and that any
user could give.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_provider.errors import SpecError
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.estimate import MemoryEstimate, estimate
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import Attention, Loss, TrainingOptions, parse_options

DATA = Path(__file__).parents[1] / "tests" / "sizing" / "data"
GB, GIB, MIB = 10**9, 2**30, 2**20
# Rows that name no config but give the sizes; the counts agree with theirs.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "GPT-2 10B (50L,4096)": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 4096,
        "n_layer": 50,
        "n_head": 32,
        "n_positions": 1024,
    },
    "StableLM-base-alpha-3B": {
        "model_type": "gpt_neox",
        "vocab_size": 50688,
        "hidden_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "intermediate_size": 16384,
    },
}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row that can be scored."""

    id: int
    tier: str
    source: str
    model: str
    config: dict[str, Any]
    options: TrainingOptions
    measured_bytes: float
    unit_assumed: bool  # the source does not say whether GB or GiB
    quantity: str  # allocated, reserved, total
    out_of_memory: bool | None
    capacity_bytes: float
    note: str

    def estimate(self) -> MemoryEstimate:
        return estimate(architecture(self.config), self.options)

    def estimated_bytes(self) -> int:
        gpu = self.estimate().gpu
        return {"allocated": gpu.allocated_bytes, "reserved": gpu.reserved_bytes, "total": gpu.total_bytes}[
            self.quantity
        ]

    @property
    def error(self) -> float:
        """(estimate - measurement) / measurement."""
        return self.estimated_bytes() / self.measured_bytes - 1


def measurements() -> list[Measurement]:
    """Every row whose architecture is known."""
    configs = json.loads((DATA / "model_configs.json").read_text())
    with (DATA / "measured_memory.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [_measurement(row, config) for row in rows if (config := _config(row, configs)) is not None]


def unscored() -> list[tuple[int, str]]:
    """(id, model) of the rows whose architecture is not known."""
    read = {row.id for row in measurements()}
    with (DATA / "measured_memory.csv").open(newline="") as lines:
        return [(int(row["id"]), row["model"]) for row in csv.DictReader(lines) if int(row["id"]) not in read]


def _config(row: dict[str, str], configs: dict[str, Any]) -> dict[str, Any] | None:
    # "as qwen2": the first Qwen's sizes in the later class, as Qwen1.5 has them.
    name = row["hf_config"].replace("Qwen-72B(as qwen2)", "Qwen1.5-72B")
    if name in configs:
        found: dict[str, Any] = configs[name]["config"]
        return found
    if row["model"] in OWN_SIZES:
        return OWN_SIZES[row["model"]]
    try:
        return dict(model_config(name))
    except SpecError:
        return None


def _measurement(row: dict[str, str], config: dict[str, Any]) -> Measurement:
    binary = row["measured_GiB_per_gpu"]
    decimal = row["measured_peak_GB_per_gpu"]
    return Measurement(
        id=int(row["id"]),
        tier=row["tier"],
        source=row["source"],
        model=row["model"],
        config=config,
        options=parse_options(_options(row)),
        measured_bytes=float(binary) * GIB if binary else float(decimal or 0) * GB,
        unit_assumed="?" in row["unit_as_printed"],
        quantity=_quantity(row["metric"]),
        out_of_memory={"True": True, "False": False}.get(row["oom"]),
        capacity_bytes=float(row["gpu_capacity_GB"] or 0) * GB,
        note=row["note"],
    )


def _quantity(metric: str) -> str:
    if "allocated" in metric or "active" in metric:
        return "allocated"
    return "reserved" if "reserved" in metric and "unknown" not in metric else "total"


def _options(row: dict[str, str]) -> dict[str, Any]:
    return {
        "method": row["method"],
        "precision": _precision(row),
        "optimizer": {"adamw8bit": "adamw-8bit", "decoupled adamw": "adamw", "adam": "adamw"}.get(
            row["optimizer"], row["optimizer"]
        ),
        "zero_stage": int(row["zero_stage"] or 0),
        "offload": _offload(row["offload"]),
        "gpus_per_node": int(row["n_gpus"]),
        "micro_batch_size": int(row["micro_batch"]),
        "sequence_length": int(row["seq_len"]),
        "gradient_accumulation_steps": 8 if "accumulation 8" in row["note"] else 1,
        "gradient_checkpointing": row["grad_checkpointing"] == "True",
        "attention": _attention(row),
        "loss": _loss(row["note"]),
        "padding": "longest" if "real data" in row["note"] else "max-length",
        **_adapters(row),
    }


def _precision(row: dict[str, str]) -> str:
    if row["optimizer_state_bytes"].startswith("4"):
        return "pure-bf16"
    if "fp32 weights" in row["note"]:
        return "fp32"
    return "fp16" if row["weights_dtype"] == "fp16" or "fp16 compute" in row["note"] else "bf16"


def _offload(text: str) -> str:
    return {"none": "none", "cpu_params(FSDP)": "all"}.get(text, "none")


def _attention(row: dict[str, str]) -> str:
    if "attn=" in row["note"]:
        return "eager" if "attn=eager" in row["note"] else "sdpa"
    return "flash" if row["flash_attn"] == "True" else "eager"


def _loss(note: str) -> str:
    if "Liger" in note and "no Liger" not in note:
        return "fused"
    return "chunked" if "chunked" in note else "full"


def _adapters(row: dict[str, str]) -> dict[str, Any]:
    if row["method"] == "full":
        return {}
    targets = row["lora_targets"]
    if "all linear" in targets:
        targets = "all-linear"
    elif "(" in targets:
        targets = targets[targets.index("(") + 1 : targets.index(")")]
    found: dict[str, Any] = {"lora_rank": int(row["lora_rank"]), "lora_targets": targets}
    if row["method"] == "qlora":
        found["double_quant"] = "no double quant" not in row["weights_dtype"] and "nf4+double" in row["weights_dtype"]
        if "bf16 storage" in row["weights_dtype"]:
            found["quant_storage"] = "bf16"
    return found


def known_to_fit() -> list[tuple[Architecture, TrainingOptions, int]]:
    """(model, options, capacity of the GPU in bytes) of each row of MosaicML's throughput tables.

    llm-foundry's own code: biases, learned positions, flash attention, cross-entropy in one kernel.
    """
    with (DATA / "mpt_throughput.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [_that_fits(row) for row in rows]


def _that_fits(row: dict[str, str]) -> tuple[Architecture, TrainingOptions, int]:
    config = {
        **model_config(f"llm-foundry/mpt-{row['model']}"),
        "max_seq_len": int(row["seq_len"]),
        "no_bias": False,
        "attn_config": {"alibi": False},
    }
    gpus = int(row["n_gpus"])
    options = TrainingOptions(
        zero_stage=3 if row["sharding"] == "FULL_SHARD" else 2,
        gpus_per_node=min(8, gpus),
        nodes=max(1, gpus // 8),
        micro_batch_size=int(row["micro_batch"]),
        sequence_length=int(row["seq_len"]),
        gradient_accumulation_steps=int(row["grad_accum"]),
        gradient_checkpointing=row["act_ckpt"] == "True",
        attention=Attention.FLASH,
        loss=Loss.KERNEL,
        holds_outputs=False,
    )
    return architecture(config), options, (40 if "40gb" in row["gpu"] else 80) * GIB
