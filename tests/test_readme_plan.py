# SPDX-License-Identifier: Apache-2.0
"""README's plan is what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from deepspeed_provider.cli import app
from typer.testing import CliRunner

README = Path(__file__).parents[1] / "README.md"
COLUMNS = 120


def test_the_plan_is_what_the_command_prints() -> None:
    (block,) = re.findall(r"```\n\$ (deepspeed-provider plan [^\n]+)\n(.*?)\n```", README.read_text(), re.DOTALL)
    command, shown = block
    result = CliRunner().invoke(app, shlex.split(command)[1:], env={"COLUMNS": str(COLUMNS)})
    assert result.exit_code == 0, result.output
    # What follows in the output is told in words.
    printed = result.output.partition("\nAssumptions\n")[0]
    assert _lines(shown) == _lines(printed)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
