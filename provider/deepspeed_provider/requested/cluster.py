# SPDX-License-Identifier: Apache-2.0
"""What a request for a plan says of the cluster that a search does not choose: logs, tags, pool, policy, runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from deepspeed_provider.clusters.cluster_body import ClusterSettings, RunIdentity
from deepspeed_provider.errors import FieldProblem, SpecError

# ``run`` is not asked for: whoever plans inside a run knows it.
CLUSTER_OPTIONS: Final = tuple(field.name for field in dataclasses.fields(ClusterSettings) if field.name != "run")
TAGS: Final = "tags"


def asked_settings(given: Mapping[str, Any], run: RunIdentity | None = None) -> ClusterSettings:
    """``given``: options by their names; ``tags`` as a mapping, or as texts such as ``team=ml``.

    Raises :class:`SpecError` with all problems.
    """
    named = {name: str(given[name]).strip() for name in CLUSTER_OPTIONS if name in given and name != TAGS}
    return ClusterSettings(**named, tags=_tags(given.get(TAGS) or {}), run=run)


def _tags(asked: object) -> dict[str, str]:
    if isinstance(asked, Mapping):
        return {str(name): str(value) for name, value in asked.items()}
    pairs = asked.split(",") if isinstance(asked, str) else asked
    if not isinstance(pairs, list | tuple):
        raise SpecError([_no_tag(asked)])
    problems, found = [], {}
    for pair in pairs:
        name, equals, value = str(pair).partition("=")
        if equals and name.strip():
            found[name.strip()] = value.strip()
        else:
            problems.append(_no_tag(pair))
    if problems:
        raise SpecError(problems)
    return found


def _no_tag(value: object) -> FieldProblem:
    return FieldProblem(field=TAGS, value=value, problem="is no tag with a value", suggestion="Write team=ml.")
