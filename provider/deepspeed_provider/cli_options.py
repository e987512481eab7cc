# SPDX-License-Identifier: Apache-2.0
"""The options of training on the command line: one for each field of ``TrainingOptions``, which has the defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final, get_args

import typer
from pydantic.fields import FieldInfo

from deepspeed_provider.sizing.options import TrainingOptions

# Panel -> field -> (what stands for a value in the help, text); the values of a choice are added.
HELP: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = MappingProxyType(
    {
        "Training": {
            "method": ("NAME", "Which weights are trained."),
            "precision": ("NAME", "Of weights and matrix products; pure-bf16 keeps no fp32 master weights."),
            "optimizer": ("NAME", "The optimizer, which decides the states per parameter."),
            "micro_batch_size": ("N", "Sequences on one GPU at a time."),
            "sequence_length": ("N", "Tokens of one sequence, padding included."),
            "gradient_accumulation_steps": ("N", "Micro-batches per optimizer step."),
            "gradient_checkpointing": ("", "Keep only each layer's input, and compute the rest again."),
            "attention": ("NAME", "The attention code."),
            "loss": ("NAME", "How it is computed: full keeps all logits in fp32, fused keeps none."),
            "padding": ("NAME", "To what sequences are padded: the sequence length, or the longest of a batch."),
            "holds_outputs": ("", "The training loop holds the model's logits through the backward pass."),
        },
        "Cluster and ZeRO": {
            "gpus_per_node": ("N", "GPUs of one node."),
            "nodes": ("N", "Machines."),
            "zero_stage": ("0..3", "What is partitioned: 1 optimizer states, 2 and gradients, 3 and parameters."),
            "offload": ("NAME", "What leaves the GPU; parameters and all need stage 3."),
            "offload_device": ("NAME", "Where it goes; nvme needs stage 3."),
            "load_in_turn": ("", "The ranks of a node read the checkpoint one after the other."),
        },
        "Adapters": {
            "lora_rank": ("N", "Rank of the adapters."),
            "lora_targets": ("NAMES", "q,k,v,o,gate,up,down, names of modules, or all-linear."),
            "lora_dropout": ("SHARE", "Dropout before the adapters; any costs memory."),
            "adapter_precision": ("NAME", "Of adapters; unset: fp32, or bf16 under pure-bf16."),
        },
        "Quantization": {
            "double_quant": ("", "Quantize the scales of 4-bit weights too."),
            "quant_storage": (
                "NAME",
                "Holds packed weights; unset: uint8, or at ZeRO 3 bf16, the only one partitioned.",
            ),
            "upcast_unquantized": (
                "",
                "Embeddings, head and norms in fp32, as PEFT prepares them; unset: below ZeRO 3.",
            ),
            "quantize_experts": ("", "Quantize experts too; transformers 5 keeps them as bare parameters and cannot."),
        },
        "ZeRO buffers": {
            "reduce_bucket_size": ("N", "Elements; unset: hidden size squared."),
            "allgather_bucket_size": ("N", "Elements, in stages 1 and 2; for the throughput."),
            "stage3_prefetch_bucket_size": ("N", "Elements; unset: 0.9 x hidden size squared."),
            "stage3_param_persistence_threshold": ("N", "Elements; unset: 10 x hidden size."),
            "stage3_max_live_parameters": ("N", "Elements."),
            "stage3_max_reuse_distance": ("N", "Elements."),
            "sub_group_size": ("N", "Elements that the optimizer steps at a time, in stage 3."),
            "overlap_comm": ("", "Reduce gradients during the backward pass; unset: in stage 3 only."),
        },
    }
)

OTHER_PANEL: Final = "Other options"
# A terminal of 80 columns cuts names of options off that are about as long as this.
LONG_NAME: Final = 19


def with_training_options(
    command: Callable[..., None], fields: Collection[str] = tuple(TrainingOptions.model_fields)
) -> Callable[..., None]:
    """``command`` with one typer option for each of these fields, in place of its ``**options``.

    Values arrive as they were typed, and as None where nothing was: ``parse_options`` then reports
    every problem together, which a parser that stops at the first cannot.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    listed = {name: panel for panel, listing in HELP.items() for name in listing if name in fields}
    listed |= {name: OTHER_PANEL for name in fields if name not in listed}
    options = [_option(name, TrainingOptions.model_fields[name], panel) for name, panel in listed.items()]
    parameters = [*own, *options]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def flag(field: str) -> str:
    """The option as it is typed."""
    return f"--{field.replace('_', '-')}"


def long_names() -> str:
    """A sentence with the options that a narrow terminal cuts off in the list, in full."""
    names = [name for name in TrainingOptions.model_fields if len(flag(name)) > LONG_NAME]
    return f"Long names in full: {', '.join(map(flag, names))}. A switch is turned off with --no- before its name."


def choices(field: FieldInfo) -> list[str]:
    """The values of a field that has a fixed set of them; empty for others."""
    enum = next((kind for kind in _types(field.annotation) if issubclass(kind, StrEnum)), None)
    return [] if enum is None else [item.value for item in enum]


def _types(annotation: Any) -> Iterator[type]:
    """Of an annotation such as ``Annotated[Precision, ...] | None``."""
    if isinstance(annotation, type):
        yield annotation
    for inner in get_args(annotation):
        yield from _types(inner)


def _option(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    metavar, text = HELP.get(panel, {}).get(name, ("VALUE", "An option of training."))
    if choices(field):
        text = f"{text} One of {', '.join(choices(field))}."
    help_text = f"{text} (default: {_written(field.default)})" if field.default is not None else text
    switch = bool in _types(field.annotation)
    names = [f"{flag(name)}/--no-{flag(name).removeprefix('--')}"] if switch else [flag(name)]
    option = typer.Option(
        *names,
        help=help_text,
        rich_help_panel=panel,
        show_default=False,
        metavar="" if switch else metavar,
    )
    kind: Any = bool | None if switch else str | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _written(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return ",".join(default) if isinstance(default, tuple) else str(default)
