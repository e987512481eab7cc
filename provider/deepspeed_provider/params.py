# SPDX-License-Identifier: Apache-2.0
"""The trigger form of a fine-tune: one Param for each field of ``FineTuneSpec``, and where it runs, in sections.

Without changes it is a demonstration that a laptop finishes in minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from airflow.sdk import Param

from deepspeed_provider.spec import DOCSTRINGS, FineTuneSpec, Method, Precision, Schedule

MODEL, DATA, LENGTH = "Model and method", "Data", "Length and learning rate"
LORA, SPEED, REGISTRY = "LoRA", "DeepSpeed and memory", "Evaluation and registration"
WHERE = "Where it runs"

DEMO: Mapping[str, Any] = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "max_steps": 120,
    "learning_rate": 1e-3,
    "sequence_length": 160,
    "effective_batch_size": 4,
    "ranks": 2,
    "evaluation_rows": 64,
    "registered_model_name": "smollm2-docstrings",
}


def finetune_params(*names: str, **defaults: Any) -> dict[str, Param]:
    """Params for a DAG.

    Args:
        names: fields to show; all where none is named.
        defaults: replace those of the demonstration.

    Raises:
        TypeError: a name or a default is no field.
    """
    fields = {field.name: field for field in dataclasses.fields(FineTuneSpec)}
    if unknown := {*names, *defaults} - set(fields):
        raise TypeError(f"no such field: {', '.join(sorted(unknown))}")
    values = {name: field.default for name, field in fields.items() if field.default is not dataclasses.MISSING}
    values |= {**DEMO, **defaults}
    return {
        name: Param(_plain(values[name]), **schema) for name, schema in _SCHEMAS.items() if not names or name in names
    }


PLACE: Mapping[str, str] = {
    "databricks_conn_id": "{{ params.databricks_conn_id }}",
    "base_uri": "{{ params.base_uri }}",
    "job": "{{ params.job | tojson }}",
}
"""The params of ``place_params`` as arguments of every operator that runs something on a cluster."""

HARDWARE: Mapping[str, str] = {
    "plan": "{{ params.plan }}",
    "plan_options": "{{ params.plan_options | tojson }}",
    "use_gpu": "{{ params.use_gpu }}",
}
"""The same, of those that train."""


def place_params(*names: str, **defaults: Any) -> dict[str, Param]:
    """Params that choose between Spark Connect, where nothing is given, and a Databricks workspace.

    Args:
        names: which; all where none is named.
        defaults: replace those by which runs go over Spark Connect, on CPU.

    Raises:
        TypeError: a name or a default is none of them.
    """
    if unknown := {*names, *defaults} - set(_PLACES):
        raise TypeError(f"no such param: {', '.join(sorted(unknown))}")
    values = dict.fromkeys(_PLACES) | {"use_gpu": False} | defaults
    return {name: Param(values[name], **schema) for name, schema in _PLACES.items() if not names or name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return ",".join(value)
    return getattr(value, "value", value)


def _text(section: str, title: str, description: str, *examples: str, optional: bool = False) -> dict[str, Any]:
    schema = {
        "type": ["string", "null"] if optional else "string",
        "title": title,
        "description": description,
        "section": section,
    }
    return {**schema, "examples": list(examples)} if examples else schema


def _choice(section: str, title: str, description: str, choices: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": "string",
        "title": title,
        "description": description,
        "section": section,
        "enum": list(choices),
        "values_display": dict(choices),
    }


def _number(
    section: str,
    title: str,
    description: str,
    *examples: float,
    kind: str = "integer",
    minimum: float | None = None,
    maximum: float | None = None,
    optional: bool = False,
) -> dict[str, Any]:
    # A number may arrive as a string (REST, CLI). The form draws a number field for several types only
    # where there are examples; otherwise it falls back to a text area of JSON.
    schema: dict[str, Any] = {
        "type": [kind, "string", *(["null"] if optional else [])],
        "title": title,
        "description": description,
        "section": section,
        "examples": list(examples),
    }
    bounds = {"minimum": minimum, "maximum": maximum}
    return schema | {name: bound for name, bound in bounds.items() if bound is not None}


def _object(section: str, title: str, description: str) -> dict[str, Any]:
    return {"type": ["object", "null"], "title": title, "description": description, "section": section}


def _flag(section: str, title: str, description: str) -> dict[str, Any]:
    return {"type": "boolean", "title": title, "description": description, "section": section}


_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "model": _text(
        MODEL,
        "Model",
        "A causal language model: a Hugging Face hub id, a folder, or a URI that the cluster can read.",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Qwen/Qwen3-0.6B",
        "meta-llama/Llama-3.2-1B",
    ),
    "model_revision": _text(MODEL, "Revision", "Branch, tag or commit on the hub. Empty: the default.", optional=True),
    "method": _choice(
        MODEL,
        "Method",
        "LoRA trains a small adapter; full trains every weight and needs several times the memory.",
        {Method.LORA.value: "LoRA", Method.FULL.value: "Full fine-tune"},
    ),
    "data": _text(
        DATA,
        "Data",
        "'docstrings' (questions and answers about the installed Python libraries), or the URI of a JSONL, Parquet "
        "or CSV file or folder with prompt and completion columns, or a text column.",
        DOCSTRINGS,
        "s3a://bucket/chats.jsonl",
        "file:///data/answers.parquet",
    ),
    "heldout_fraction": _number(
        DATA, "Held-out share", "Share of the rows kept for evaluation.", 0.05, 0.1, 0.2, kind="number"
    ),
    "max_steps": _number(
        LENGTH, "Steps", "Optimizer steps. Empty when epochs are given.", 60, 500, 2000, minimum=1, optional=True
    ),
    "epochs": _number(
        LENGTH,
        "Epochs",
        "Passes over the data. Empty when steps are given.",
        1,
        2,
        3,
        kind="number",
        optional=True,
    ),
    "learning_rate": _number(
        LENGTH,
        "Learning rate",
        "Peak of the schedule. Empty: 5e-4 for LoRA, 2e-5 for a full fine-tune.",
        5e-4,
        2e-4,
        2e-5,
        kind="number",
        optional=True,
    ),
    "sequence_length": _number(
        LENGTH,
        "Sequence length",
        "Tokens; longer rows are cut.",
        160,
        512,
        2048,
        minimum=8,
        maximum=1_048_576,
    ),
    "schedule": _choice(
        LENGTH,
        "Schedule",
        "Learning rate after the warm-up.",
        {schedule.value: schedule.value for schedule in Schedule},
    ),
    "warmup_ratio": _number(
        LENGTH, "Warm-up", "Share of the steps in which the learning rate rises.", 0.0, 0.05, 0.1, kind="number"
    ),
    "weight_decay": _number(LENGTH, "Weight decay", "Of AdamW.", 0.0, 0.01, 0.1, kind="number", minimum=0, maximum=1),
    "seed": _number(LENGTH, "Seed", "Of row order and of the adapter's first weights.", 42, minimum=0),
    "lora_rank": _number(LORA, "Rank", "Width of the adapter.", 8, 16, 64, minimum=1, maximum=1024),
    "lora_alpha": _number(LORA, "Alpha", "Scale of the adapter; usually twice the rank.", 16, 32, 128, minimum=1),
    "lora_dropout": _number(LORA, "Dropout", "Inside the adapter.", 0.0, 0.05, kind="number", minimum=0),
    "lora_targets": _text(
        LORA, "Layers", "Module names, separated by commas, or 'all-linear'.", "all-linear", "q_proj,v_proj"
    ),
    "merge_adapter": _flag(LORA, "Merge", "Save the adapter merged into the model, ready to serve."),
    "ranks": _number(SPEED, "Ranks", "Training processes: one per GPU, or processes on CPU.", 1, 2, 8, minimum=1),
    "effective_batch_size": _number(
        SPEED, "Effective batch", "Sequences per optimizer step, over all ranks.", 4, 16, 64, minimum=1, optional=True
    ),
    "micro_batch_size": _number(
        SPEED, "Micro batch", "Sequences at once per rank. Empty: follows.", 1, 2, 4, minimum=1, optional=True
    ),
    "gradient_accumulation_steps": _number(
        SPEED, "Accumulation", "Micro batches per optimizer step. Empty: follows.", 1, 4, minimum=1, optional=True
    ),
    "zero_stage": _number(
        SPEED,
        "ZeRO stage",
        "What the ranks share instead of copying: 1 optimizer, 2 and gradients, 3 and weights.",
        0,
        1,
        2,
        3,
        minimum=0,
        maximum=3,
    ),
    "precision": _choice(
        SPEED,
        "Precision",
        "auto takes what the hardware does best.",
        {precision.value: precision.value for precision in Precision},
    ),
    "gradient_checkpointing": _flag(SPEED, "Gradient checkpointing", "Less memory for about a third more time."),
    "max_gradient_norm": _number(SPEED, "Gradient clipping", "Largest norm.", 0.5, 1.0, kind="number"),
    "eval_steps": _number(
        REGISTRY, "Evaluate each N steps", "During training; 0 evaluates at its end only.", 0, 20, 100, minimum=0
    ),
    "evaluation_rows": _number(
        REGISTRY, "Evaluation rows", "Held-out rows compared at most. Empty: all.", 64, 500, minimum=1, optional=True
    ),
    "generations": _number(
        REGISTRY, "Sample answers", "Of base and tuned model, side by side.", 0, 5, 20, minimum=0, maximum=100
    ),
    "registered_model_name": _text(
        REGISTRY, "Registered name", "In the MLflow registry. Empty: the model is not registered.", optional=True
    ),
    "max_perplexity_ratio": _number(
        REGISTRY,
        "Gate",
        "Registered only when the tuned model's held-out perplexity is below this share of the base model's.",
        0.5,
        0.9,
        1.0,
        kind="number",
    ),
}

_PLACES: Mapping[str, dict[str, Any]] = {
    "databricks_conn_id": _text(
        WHERE,
        "Databricks connection",
        "Runs go through the Jobs API of its workspace. Empty: Spark Connect, or the embedded engine on this machine.",
        "databricks_default",
        optional=True,
    ),
    "base_uri": _text(
        WHERE,
        "Folder",
        "Where data sets, models and results go, reachable from the cluster. On Databricks a folder of a Volume. "
        "Empty: the Spark Connect connection's own.",
        "/Volumes/main/default/fine-tunes",
        optional=True,
    ),
    "plan": _text(
        WHERE,
        "Plan",
        "'auto' chooses and prices a GPU cluster of the Databricks workspace when the fine-tune starts, and ranks "
        "follow it. Empty: settings follow the hardware that is there, or that the job names.",
        "auto",
        optional=True,
    ),
    "plan_options": _object(
        WHERE,
        "Limits of the plan",
        'Of an automatic one, by the parameters of GpuPlanOperator: {"budget_usd": 50, "deadline_hours": 12}. For '
        'machines that are there {"hardware": {"gpu": "A100-80GB", "gpus_per_node": 8}}.',
    ),
    "job": _object(
        WHERE,
        "Job",
        'How runs are submitted to Databricks: {"existing_cluster_id": …} or {"cluster": …}, and other '
        "settings of the operators' argument job.",
    ),
    "use_gpu": _flag(WHERE, "GPUs", "The ranks train on GPUs. With a plan they do anyway; otherwise on CPU if unset."),
}
