# SPDX-License-Identifier: Apache-2.0
"""A repository that a training script lies in, by the Jobs API's names for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from deepspeed_provider.credentials import looks_secret, secret_problem
from deepspeed_provider.errors import FieldProblem, did_you_mean
from deepspeed_provider.training.git_checkout import TOKEN_VARIABLE

REFERENCES: Final = ("git_branch", "git_tag", "git_commit")
# The provider decides nothing here: git speaks to all of them alike.
FIELDS: Final = ("git_url", "git_provider", *REFERENCES)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_NAME: Final = re.compile(r"[^\s~^:?*\[\\-][^\s~^:?*\[\\]*")


def script_in(git_source: Any, script: Any, problems: list[FieldProblem]) -> dict[str, Any]:
    """``{"git": …, "path": …}`` of a script by its path in the repository; adds to ``problems``."""
    path = PurePosixPath(str(script))
    if path.is_absolute() or path.suffix != ".py" or ".." in path.parts:
        works = "Give its path in the repository, such as training/train.py."
        problems.append(
            FieldProblem(field="script", value=str(script), problem="is no Python file in Git", suggestion=works)
        )
    if not isinstance(git_source, Mapping):
        works = "Give {'git_url': 'https://…', 'git_commit': …}."
        problems.append(FieldProblem(field="git_source", value=git_source, problem="is no mapping", suggestion=works))
        return {}
    problems += [
        FieldProblem(
            field=f"git_source.{name}", value=value, problem="is unknown", suggestion=did_you_mean(name, FIELDS)
        )
        for name, value in git_source.items()
        if name not in FIELDS
    ]
    _check_url(git_source.get("git_url"), problems)
    given = {name: git_source[name] for name in REFERENCES if git_source.get(name) is not None}
    if len(given) > 1:
        problem, works = f"names {' and '.join(given)}", "Give one of them."
        problems.append(FieldProblem(field="git_source", value=dict(git_source), problem=problem, suggestion=works))
    for name, value in given.items():
        _check_reference(name, value, problems)
    return {"git": {"git_url": git_source.get("git_url"), **given}, "path": str(path)}


def _check_url(url: Any, problems: list[FieldProblem]) -> None:
    field, parts = "git_source.git_url", urlsplit(url if isinstance(url, str) else "")
    if isinstance(url, str) and looks_secret("", url):
        problems.append(secret_problem(field, TOKEN_VARIABLE))
    elif parts.scheme not in ("https", "http") or not parts.netloc:
        works = "Give an address that begins with https://; the cluster has no keys for others."
        problems.append(FieldProblem(field=field, value=url, problem="is no address for git", suggestion=works))


def _check_reference(name: str, value: Any, problems: list[FieldProblem]) -> None:
    commit = name == "git_commit"
    if not isinstance(value, str) or not (_COMMIT if commit else _NAME).fullmatch(value):
        problem = "is no whole commit" if commit else "is no name in Git"
        works = "Give all of its 40 digits." if commit else "Give it without refs/heads/ or refs/tags/."
        problems.append(FieldProblem(field=f"git_source.{name}", value=value, problem=problem, suggestion=works))
