# SPDX-License-Identifier: Apache-2.0
"""All problems of a request, each named as it was typed."""

from __future__ import annotations

import json
from collections.abc import Container

import typer
from rich.console import Console

from deepspeed_provider.cli_options import flag
from deepspeed_provider.errors import SpecError
from deepspeed_provider.requested.plan import CATALOG_FIELD
from deepspeed_provider.sizing.wire import problems_as_json


def tell(error: SpecError, options: Container[str], *, as_json: bool) -> None:
    """On standard error; also as JSON on standard output where a program reads the answer.

    ``options``: fields that are options; others stand in a file.
    """
    content = problems_as_json(error.problems)
    if as_json:
        typer.echo(json.dumps(content, allow_nan=False))
    console = Console(stderr=True, soft_wrap=True)
    for problem in content["error"]["problems"]:
        value = "" if problem["value"] is None else f" {problem['value']!r}"
        text = f"{_name(problem['field'], options)}{value}: {problem['problem']}. {problem['suggestion']}".rstrip()
        console.print(text, style="red", markup=False, highlight=False)


def _name(field: str, options: Container[str]) -> str:
    if field in options:
        return flag(field)
    if field.isupper():  # an argument
        return field
    if field.startswith(CATALOG_FIELD):
        return f"In --catalog, {field.removeprefix(CATALOG_FIELD)}"
    return f"In the model's config, {field}"
