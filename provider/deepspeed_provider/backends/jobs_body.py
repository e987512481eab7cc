# SPDX-License-Identifier: Apache-2.0
"""The body of ``runs/submit``. Pure.

Shapes: databricks-sdk 0.162, ``service/jobs.py`` (SubmitTask, SubmitRun).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from deepspeed_provider.backends.base import RunRequest
from deepspeed_provider.backends.jobs_fields import mistyped
from deepspeed_provider.credentials import looks_secret, secret_problem
from deepspeed_provider.errors import FieldProblem, SpecError, did_you_mean

TASK_KEY: Final = "deepspeed"
LONGEST_NAME: Final = 4000
# The platform's own limit is for a run that nobody watches any more; whoever watches cancels before it. Where nobody
# here keeps a time, the limit is the user's to set.
TIMEOUT_GRACE_S: Final = 900.0
# Fields that make a run exactly one, and found again.
OURS: Final = ("idempotency_token", "tasks", "run_name")
OURS_IN_TASK: Final = (
    "task_key",
    "max_retries",
    "spark_python_task",
    "new_cluster",
    "existing_cluster_id",
    "depends_on",
)


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """How a run is submitted to a workspace.

    Attributes:
        code_folder: folder of a Volume, or below ``/Workspace``, for the code that travels.
        cluster: ``new_cluster``, as a plan has it. Or ``existing_cluster_id``.
        libraries: of the task, in the API's shape.
        queue: wait when the workspace has no room, rather than fail.
        run_fields: further fields of ``runs/submit``: ``run_as``, ``access_control_list``, ``email_notifications``,
            ``budget_policy_id``, …; ``timeout_seconds`` where the operator has no ``timeout``.
        task_fields, cluster_fields: further fields of the task and of ``new_cluster``. Secrets for the ranks are
            references in ``spark_env_vars``: ``{"HF_TOKEN": "{{secrets/SCOPE/KEY}}"}``.
    """

    code_folder: str
    cluster: Mapping[str, Any] | None = None
    existing_cluster_id: str | None = None
    libraries: Sequence[Mapping[str, Any]] = ()
    queue: bool = True
    run_fields: Mapping[str, Any] = field(default_factory=dict)
    task_fields: Mapping[str, Any] = field(default_factory=dict)
    cluster_fields: Mapping[str, Any] = field(default_factory=dict)


def job_settings(given: Mapping[str, Any]) -> JobSettings:
    """The settings by their names. Raises :class:`SpecError` with all that is wrong with them."""
    known = [each.name for each in fields(JobSettings)]
    problems = [
        FieldProblem(
            field=f"job.{name}", value=value, problem="is no setting of a job", suggestion=did_you_mean(name, known)
        )
        for name, value in given.items()
        if name not in known
    ]
    problems += [
        FieldProblem(field=f"job.{name}", value=given[name], problem=f"is no {what}", suggestion=works)
        for name, (is_one, what, works) in _KINDS.items()
        if given.get(name) is not None and not is_one(given[name])
    ]
    if problems:
        raise SpecError(problems)
    problems = [
        _problem(f"job.{part}.{name}", given[part][name], "is set here, so that the run is one and is found again")
        for part, protected in (("run_fields", OURS), ("task_fields", OURS_IN_TASK))
        for name in protected
        if name in (given.get(part) or {})
    ]
    problems += mistyped(given)
    problems += [
        secret_problem(field, name)
        for field, name, value in _leaves("job", "", given)
        if field not in {problem.field for problem in problems} and looks_secret(name, value)
    ]
    if given.get("cluster") and given.get("existing_cluster_id"):
        problems.append(_problem("job.existing_cluster_id", given["existing_cluster_id"], "cluster is given too"))
    if problems:
        raise SpecError(problems)
    return JobSettings(**{name: value for name, value in given.items() if value is not None})


def _is_list_of_libraries(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)


_FIELDS: Final = (lambda value: isinstance(value, Mapping), "mapping", "Give fields of the API by their names.")
_KINDS: Final[Mapping[str, tuple[Callable[[Any], bool], str, str]]] = {
    "code_folder": (lambda value: isinstance(value, str), "text", "Give a folder of a Volume, or below /Workspace."),
    "existing_cluster_id": (lambda value: isinstance(value, str), "text", "Give the id of a cluster that runs."),
    "queue": (lambda value: isinstance(value, bool), "yes or no", "Give true or false."),
    "libraries": (_is_list_of_libraries, "list of libraries", "Give [{'pypi': {'package': 'peft==0.15.2'}}]."),
    **dict.fromkeys(("cluster", "run_fields", "task_fields", "cluster_fields"), _FIELDS),
}


def _leaves(field: str, name: str, value: Any) -> Iterator[tuple[str, str, str]]:
    """(place, name, text) of every text in JSON."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(f"{field}.{key}", str(key), each)
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from _leaves(f"{field}[{place}]", name, each)
    elif isinstance(value, str):
        yield field, name, value


def run_name(request: RunRequest, token: str) -> str:
    """For people; the end of it finds the run again among those of the workspace."""
    return f"{request.name or 'deepspeed'}"[: LONGEST_NAME - 20] + f" {name_mark(token)}"


def name_mark(token: str) -> str:
    return f"[{token[:12]}]"


def submit_body(
    request: RunRequest, token: str, settings: JobSettings, *, script: str, parameters: Sequence[str]
) -> dict[str, Any]:
    """``script`` and ``parameters``: what the task runs, as the cluster sees it.

    Raises :class:`SpecError` with every field of the user's that contradicts ours.
    """
    problems: list[FieldProblem] = []
    task: dict[str, Any] = {
        "task_key": TASK_KEY,
        # Retries are decided by whoever waits, who knows why the run failed.
        "max_retries": 0,
        "spark_python_task": {"python_file": script, "parameters": list(parameters)},
    }
    if settings.existing_cluster_id:
        task["existing_cluster_id"] = settings.existing_cluster_id
        problems += [
            _problem(f"job.cluster_fields.{name}", value, "has no cluster to be of: existing_cluster_id is given")
            for name, value in settings.cluster_fields.items()
        ]
    else:
        task["new_cluster"] = _merged(
            dict(settings.cluster or {}), settings.cluster_fields, "job.cluster_fields", problems
        )
    if settings.libraries:
        task["libraries"] = [dict(library) for library in settings.libraries]
    body: dict[str, Any] = {
        "run_name": run_name(request, token),
        "idempotency_token": token,
        "queue": {"enabled": settings.queue},
    }
    if request.timeout_s is not None:
        body["timeout_seconds"] = math.ceil(request.timeout_s + TIMEOUT_GRACE_S)
    body = _merged(body, settings.run_fields, "job.run_fields", problems)
    body["tasks"] = [_merged(task, settings.task_fields, "job.task_fields", problems)]
    if problems:
        raise SpecError(problems)
    return body


def _merged(
    ours: dict[str, Any],
    theirs: Mapping[str, Any],
    where: str,
    problems: list[FieldProblem],
) -> dict[str, Any]:
    """``ours`` with the user's fields: objects grow together, lists are joined, and nothing of ours changes."""
    merged = dict(ours)
    for name, value in theirs.items():
        own, place = merged.get(name), f"{where}.{name}"
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            merged[name] = _merged(dict(own), value, place, problems)
        elif isinstance(own, list) and isinstance(value, list | tuple):
            merged[name] = [*own, *value]
        elif name in merged and own != value:
            problems.append(_problem(place, value, f"contradicts what was planned, {own!r}"))
        else:
            merged[name] = value
    return merged


def _problem(place: str, value: Any, problem: str) -> FieldProblem:
    return FieldProblem(field=place, value=value, problem=problem, suggestion="Leave it out.")
