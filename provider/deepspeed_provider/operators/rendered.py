# SPDX-License-Identifier: Apache-2.0
"""Arguments of operators as templates leave them: an empty Param is a text, and so are objects and switches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_provider.credentials import REFERENCE
from deepspeed_provider.errors import SpecError
from deepspeed_provider.handed_plan import AUTO, read_object
from deepspeed_provider.operators.plan import is_blank


class KeepsReferences:
    """For operators: leaves references to a workspace's secrets as they are; in Jinja their braces mean something
    else."""

    def render_template(self, content: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(content, str):
            content = REFERENCE.sub(r"{% raw %}\g<0>{% endraw %}", content)
        return super().render_template(content, *arguments, **options)  # type: ignore[misc]


def text(value: str | None) -> str | None:
    """None where nothing is given."""
    return None if is_blank(value) else value


def job(value: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    """The argument ``job``, also as JSON. Raises :class:`SpecError`."""
    return None if is_blank(value) else read_object(value, "job", "Give {'existing_cluster_id': …}.")


def job_without_workspace(job: Mapping[str, Any]) -> SpecError:
    """Where a connection was forgotten, the run would go elsewhere without a word."""
    works = "Give databricks_conn_id, or leave the job out: over Spark Connect the server has its cluster."
    return SpecError.of("job", dict(job), "is for a workspace, and none is named", works)


def plan(value: Any) -> Any:
    """The argument ``plan``; ``auto`` however it is written, None where nothing is given."""
    if is_blank(value):
        return None
    return AUTO if isinstance(value, str) and value.strip().lower() == AUTO else value


def plan_options(value: Any) -> dict[str, Any] | None:
    """The argument ``plan_options``, also as JSON. Raises :class:`SpecError`."""
    return None if is_blank(value) else read_object(value, "plan_options", "Give {'budget_usd': 50}.")


def switch(name: str, value: bool | str | None) -> bool:
    """True or false, also as a word; nothing is false. Raises :class:`SpecError`."""
    if is_blank(value):
        return False
    word = str(value).strip().lower()
    if word not in ("true", "false"):
        raise SpecError.of(name, value, "should be true or false", "Leave it out for false.")
    return word == "true"
