# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider estimate``: how much memory a fine-tune needs, for a person, as JSON, or for a whole file."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deepspeed_provider.cli_options import with_training_options
from deepspeed_provider.cli_problems import tell
from deepspeed_provider.cli_report import print_report
from deepspeed_provider.clusters.hardware import INTERCONNECT_GBPS
from deepspeed_provider.clusters.wire import throughput_as_json
from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.requested.estimate import KEYS, Answer, answer
from deepspeed_provider.requested.model_source import ModelSource, hub_fetch
from deepspeed_provider.sizing.wire import estimate_as_json, failure_as_json, problems_as_json

MODEL_PANEL = "Model"
HARDWARE_PANEL = "Hardware"
OUTPUT_PANEL = "Output"


@with_training_options
def estimate(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A bundled model's name, the path of a config.json or of a model's folder, or a hub id (--download).",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Instead of a model, its number of parameters: 7B, 350M, 7e9.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Tell too whether it fits this GPU and how fast it goes: A100-80GB, H100, A10G, T4, ...",
            rich_help_panel=HARDWARE_PANEL,
        ),
    ] = None,
    interconnect_gbps: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help=f"Network of one node, in Gbit/s. (default: {INTERCONNECT_GBPS})",
            rich_help_panel=HARDWARE_PANEL,
        ),
    ] = None,
    download: Annotated[
        bool,
        typer.Option(
            "--download", metavar="", help="Fetch the config of an unknown hub id.", rich_help_panel=MODEL_PANEL
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", metavar="", help="Print one JSON object, sizes in bytes.", rich_help_panel=OUTPUT_PANEL),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            metavar="",
            help="Show each part's formula, numbers and source.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Answer each line of a file ('-' is standard input): a JSON object with these options as keys, "
            "underscores for dashes. One line of JSON each; exit status 1 where a line had errors.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    **options: Any,
) -> None:
    """Estimate GPU, host and NVMe memory of a fine-tune, from the model's config alone."""
    source = ModelSource(fetch=hub_fetch() if download else None)
    named = {"model": model, "parameters": parameters, "gpu": gpu, "interconnect_gbps": interconnect_gbps}
    values = {**named, **options}
    try:
        if batch is not None:
            _refuse_beside_batch(values)
            good = _answer_lines(_lines(batch), source, explain=explain)
            raise typer.Exit(0 if good else 1)
        found = answer(values, source)
    except SpecError as error:
        tell(error, (*KEYS, "batch"), as_json=as_json)
        raise typer.Exit(2) from None
    if as_json:
        _print_json(_as_json(found, explain=explain))
    else:
        print_report(Console(soft_wrap=False), found, explain=explain)


def _refuse_beside_batch(values: Mapping[str, Any]) -> None:
    works = "Write it in the lines."
    problems = [
        FieldProblem(field=name, value=value, problem="--batch takes it from the file", suggestion=works)
        for name, value in values.items()
        if value is not None
    ]
    if problems:
        raise SpecError(problems)


def _lines(file: str) -> Iterator[bytes]:
    """Of the file, as they arrive. Raises :class:`SpecError` at once for a file that cannot be opened."""
    if file == "-":
        return iter(sys.stdin.buffer)
    try:
        # Read as long as the process lives: lines may still be written at its other end.
        opened = Path(file).open("rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        problem = FieldProblem(
            field="batch", value=file, problem=f"cannot be read ({reason})", suggestion="Give a file, or - for stdin."
        )
        raise SpecError([problem]) from None
    return iter(opened)


def _answer_lines(lines: Iterable[bytes], source: ModelSource, *, explain: bool) -> bool:
    """Prints an answer for each line that is not blank; whether all were without errors."""
    good = True
    for number, line in enumerate(lines, start=1):
        if line.strip():
            content = _answered(line, number, source, explain=explain)
            good = good and "error" not in content
            _print_json(content)
    return good


def _answered(line: bytes, number: int, source: ModelSource, *, explain: bool) -> Mapping[str, Any]:
    try:
        found = answer(_values(line), source)
    except SpecError as error:
        return problems_as_json(error.problems, line=number)
    except Exception as error:  # noqa: BLE001
        # A mistake of ours on one line must not cost the answers to all that follow.
        traceback.print_exc()
        return failure_as_json(f"internal error, please report it: {type(error).__name__}: {error}", line=number)
    return _as_json(found, explain=explain)


def _as_json(found: Answer, *, explain: bool) -> Mapping[str, Any]:
    content = estimate_as_json(found.estimate, model=found.model.name, explain=explain)
    if found.on_hardware is not None:
        content["throughput"] = throughput_as_json(found.on_hardware.throughput)
        content["fits"] = found.on_hardware.fit.value
    return content | {"warnings": list(found.warnings)}


def _values(line: bytes) -> Mapping[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _unreadable(line, f"is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise _unreadable(line, f"is a JSON {type(values).__name__}, not an object")
    return values


def _unreadable(line: bytes, problem: str) -> SpecError:
    text = line.decode(errors="replace").strip()
    works = 'Write an object such as {"model": "gpt2", "method": "lora"}.'
    return SpecError([FieldProblem(field="line", value=text, problem=problem, suggestion=works)])


def _print_json(content: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(content, allow_nan=False))
    sys.stdout.flush()
