# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider config``: a DeepSpeed configuration judged before it costs money, and the rules of that."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepspeed_provider.deepspeed_config.check import check, findings_as_json
from deepspeed_provider.deepspeed_config.findings import Facts, Finding, Launcher, Severity
from deepspeed_provider.deepspeed_config.rules import RULES
from deepspeed_provider.deepspeed_config.schema import schema
from deepspeed_provider.errors import FieldProblem, SpecError, tried
from deepspeed_provider.sizing.options import Method
from deepspeed_provider.sizing.wire import problems_as_json

LONGEST_VALUE: Final = 40
# Far beyond what DeepSpeed reads, and far from what printing can still do.
DEEPEST: Final = 50
PRECISIONS: Final = ("fp32", "bf16", "fp16")
_STYLES: Final = {Severity.ERROR: "bold red", Severity.WARNING: "yellow"}

config_app = typer.Typer(no_args_is_help=True, help="DeepSpeed configurations.")


@config_app.command("check")
def config_check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="DeepSpeed's JSON; '-' is standard input.")],
    world_size: Annotated[
        str | None, typer.Option(metavar="N", help="Ranks; then the batch size is judged exactly.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which weights are trained: full, lora or qlora.")
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Who reads it first: deepspeed, or hf: Hugging Face's trainer, which replaces auto.",
        ),
    ] = Launcher.DEEPSPEED.value,
    model_precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="In which the model was trained: fp32, bf16 or fp16.")
    ] = None,
    trained: Annotated[str | None, typer.Option(metavar="N", help="Parameters that take gradients.")] = None,
    use_gpu: Annotated[bool | None, typer.Option("--gpu/--cpu", help="Where it trains.", show_default=False)] = None,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--no-bf16", help="Whether the GPUs have bfloat16.", show_default=False)
    ] = None,
    disk: Annotated[
        bool | None,
        typer.Option("--disk/--no-disk", help="Whether the nodes have drives of their own.", show_default=False),
    ] = None,
    libaio: Annotated[
        bool | None, typer.Option("--libaio/--no-libaio", help="Whether libaio is installed.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell what is wrong with a DeepSpeed configuration; what is not told here is not judged.

    Exit status 1 where there are errors, 2 where the file cannot be read.
    """
    problems: list[FieldProblem] = []
    facts = Facts(
        world_size=tried(lambda: _count("world-size", world_size), problems),
        method=tried(lambda: Method(_named("method", method, list(Method))), problems) if method is not None else None,
        launcher=tried(lambda: Launcher(_named("launcher", launcher, list(Launcher))), problems) or Launcher.DEEPSPEED,
        model_precision=(
            tried(lambda: _named("model-precision", model_precision, PRECISIONS), problems)
            if model_precision is not None
            else None
        ),
        trained_parameters=tried(lambda: _count("trained", trained), problems),
        use_gpu=use_gpu,
        bf16=bf16,
        has_disk=disk,
        has_libaio=libaio,
    )
    config = tried(lambda: _read(file), problems)
    if problems or config is None:
        _refuse(SpecError(problems), as_json=as_json)
    findings = check(config, facts)
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    if as_json:
        counts = {"errors": errors, "warnings": len(findings) - errors}
        answer = {"deepspeed": schema().version, **counts, "findings": findings_as_json(findings)}
        typer.echo(json.dumps(answer, allow_nan=False))
    else:
        _print(findings, errors, file, batch_is_exact=world_size is not None)
    raise typer.Exit(1 if errors else 0)


@config_app.command("rules")
def config_rules() -> None:
    """List the rules of the check, each with what DeepSpeed does with a configuration that breaks it."""
    table = Table()
    table.add_column("Rule", no_wrap=True)
    table.add_column("")
    table.add_column("Why", overflow="fold")
    for rule in RULES:
        table.add_row(rule.name, Text(rule.severity.value, style=_STYLES[rule.severity]), Text(rule.why))
    Console().print(table)


def _count(name: str, asked: str | None) -> int | None:
    """Raises SpecError for what is no whole number from 1."""
    if asked is None:
        return None
    try:
        number = int(asked)
    except ValueError:
        number = 0
    if number < 1:
        raise _problem(name, asked, "should be a whole number from 1", "Leave it out where it is not known.")
    return number


def _named(name: str, asked: str, known: Sequence[str]) -> str:
    """Raises SpecError for what is not among them."""
    if asked in known:
        return asked
    near = difflib.get_close_matches(asked, known, n=1, cutoff=0)[0]
    raise _problem(name, asked, f"should be one of {', '.join(known)}", f"Try '{near}'.")


def _read(file: str) -> dict[str, Any]:
    """The configuration; raises SpecError with one problem for anything that is no JSON object."""
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _problem("FILE", file, f"cannot be read ({reason})", "Give a file, or - for standard input.") from None
    works = "DeepSpeed's configuration is a JSON object, without comments."
    try:
        text = raw.decode("utf-8-sig")
        config = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise _problem("FILE", file, f"is not JSON ({error})", works) from None
    if _depth(config) > DEEPEST:
        raise _problem("FILE", file, f"is nested more than {DEEPEST} levels deep", works)
    if not isinstance(config, dict):
        raise _problem("FILE", file, f"holds a JSON {type(config).__name__}, not an object", works)
    return config


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """DeepSpeed refuses a key that is there twice; Python would take the last one."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found


def _depth(content: Any) -> int:
    """Levels of objects and lists, counted no further than is allowed."""
    depth, level = 0, [content]
    while level and depth <= DEEPEST:
        depth += 1
        objects = [list(item.values()) if isinstance(item, dict) else item for item in level]
        level = [inner for item in objects if isinstance(item, list) for inner in item]
    return depth


def _number(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _problem(field: str, value: object, problem: str, suggestion: str) -> SpecError:
    return SpecError([FieldProblem(field=field, value=value, problem=problem, suggestion=suggestion)])


def _refuse(error: SpecError, *, as_json: bool) -> NoReturn:
    if as_json:
        typer.echo(json.dumps(problems_as_json(error.problems), allow_nan=False))
    console = Console(stderr=True, soft_wrap=True)
    for problem in error.problems:
        name = problem.field if problem.field.isupper() else f"--{problem.field}"
        text = f"{name} {problem.value!r}: {problem.problem}. {problem.suggestion}"
        console.print(text, style="red", markup=False, highlight=False)
    raise typer.Exit(2)


def _print(findings: list[Finding], errors: int, file: str, *, batch_is_exact: bool) -> None:
    console = Console()
    if findings:
        console.print(_table(findings))
    warnings = len(findings) - errors
    name = "standard input" if file == "-" else file
    counted = f"{_counted(errors, 'error')}, {_counted(warnings, 'warning')}" if findings else "no problems"
    text = f"{name}: {counted} (DeepSpeed {schema().version})."
    if not batch_is_exact:
        text += " With --world-size the batch size is judged exactly."
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(findings: list[Finding]) -> Table:
    table = Table(show_lines=True, expand=False)
    table.add_column("", no_wrap=True)
    table.add_column("Where", overflow="fold", ratio=2)
    table.add_column("What is wrong, and what works", overflow="fold", ratio=3)
    for finding in findings:
        value = "" if finding.value is None else f" = {_short(finding.value)}"
        table.add_row(
            Text(finding.severity.value, style=_STYLES[finding.severity]),
            Text(f"{_printable(finding.path) or '(the whole)'}{value}\n") + Text(finding.rule, style="dim"),
            Text(f"{finding.problem} ") + Text(finding.suggestion, style="green"),
        )
    return table


def _printable(text: str) -> str:
    """JSON may hold half a surrogate pair, which no terminal takes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
