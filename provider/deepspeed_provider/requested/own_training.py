# SPDX-License-Identifier: Apache-2.0
"""A training script or function of the user's own, as a DAG names it, made ready for the ranks.

Each function adds what it finds wrong to ``problems``, so that all of it is told at once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from deepspeed_provider.credentials import REFERENCE, looks_secret, secret_problem
from deepspeed_provider.errors import FieldProblem, did_you_mean
from deepspeed_provider.training.own_code import CONFIG_FLAGS

Problems = list[FieldProblem]

# Where a workspace's cluster finds files by itself.
ON_CLUSTER: Final = ("/Workspace/", "/Volumes/", "dbfs:/")
_BY_NAME: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*")
# What torchrun tells each rank.
_OF_RANKS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def script_place(script: Any, problems: Problems) -> dict[str, str]:
    """``{"uri": …}`` of a script on the cluster, or ``{"shipped": name, "digest": …}`` of one that travels."""
    text = str(script)
    if text.startswith(ON_CLUSTER):
        return {"uri": text.removeprefix("dbfs:") if text.startswith("dbfs:/Volumes/") else text}
    path = Path(text)
    works = "Give a .py file of this machine by its whole path, or one below /Workspace or /Volumes."
    if "://" in text:
        problems.append(FieldProblem(field="script", value=text, problem="is no file for Python", suggestion=works))
    elif path.suffix != ".py" or not path.is_file():
        problems.append(
            FieldProblem(field="script", value=text, problem="is no Python file on this machine", suggestion=works)
        )
    else:
        return {"shipped": path.name, "digest": hashlib.sha256(path.read_bytes()).hexdigest()[:16]}
    return {}


def places_of(code: Any, problems: Problems) -> tuple[str, ...]:
    """Modules and package folders of this machine; one, or a list of them."""
    places = tuple(str(each) for each in ([code] if isinstance(code, str | Path) else code))
    problems += [
        FieldProblem(
            field=f"code[{index}]",
            value=place,
            problem="is not on this machine",
            suggestion="Give modules and package folders by their whole paths.",
        )
        for index, place in enumerate(places)
        if not Path(place).exists()
    ]
    return places


def require_cluster(job: Mapping[str, Any] | None, problems: Problems) -> None:
    """A workspace has to be told where to run; nothing is planned for code that nobody here knows."""
    if not (job or {}).get("cluster") and not (job or {}).get("existing_cluster_id"):
        works = "Give job={'cluster': …}, as a plan of GpuPlanOperator has it, or job={'existing_cluster_id': …}."
        problems.append(FieldProblem(field="job", value=job, problem="names no cluster", suggestion=works))


def refuse_git(job: Mapping[str, Any] | None, problems: Problems) -> None:
    """A checkout is made for tasks whose own file is in Git, and its place on the cluster is told to that file only."""
    source = ((job or {}).get("run_fields") or {}).get("git_source")
    if source is not None:
        problems.append(
            FieldProblem(
                field="job.run_fields.git_source",
                value=source,
                problem="is checked out for tasks whose file is in Git, and here that is the launcher's",
                suggestion="Give the operator itself git_source, and the script by its path in the repository.",
            )
        )


def words(arguments: Any, problems: Problems) -> list[str]:
    """A script's arguments as the texts that it will see."""
    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        works = "Give a list, such as ['--epochs', 3]."
        problems.append(FieldProblem(field="arguments", value=arguments, problem="is no list", suggestion=works))
        return []
    found: list[str] = []
    for place, value in enumerate(arguments):
        field = f"arguments[{place}]"
        if value is None or not isinstance(value, str | int | float | Path):
            problem = "is nothing" if value is None else f"is a {type(value).__name__}, not one word"
            works = "Leave it out." if value is None else "Give its parts one by one, or write it as JSON."
            problems.append(FieldProblem(field=field, value=value, problem=problem, suggestion=works))
            continue
        flag, equals, given = str(value).partition("=")
        name = flag if equals else found[-1] if found and found[-1].startswith("-") else ""
        if looks_secret(name.lstrip("-"), given if equals else value):
            problems.append(secret_problem(field, name.lstrip("-").upper().replace("-", "_") or "MY_TOKEN"))
        found.append(str(value))
    return found


def keywords(arguments: Any, problems: Problems) -> dict[str, Any]:
    """A function's arguments: JSON values by name."""
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        works = "Give a mapping, such as {'epochs': 3}."
        problems.append(
            FieldProblem(field="arguments", value=arguments, problem="is no mapping of names", suggestion=works)
        )
        return {}
    for name, value in arguments.items():
        field = f"arguments.{name}"
        try:
            text = json.dumps(value)
        except (TypeError, ValueError) as error:
            works = "Give numbers, texts, lists and mappings."
            problems.append(
                FieldProblem(field=field, value=value, problem=f"travels as JSON: {error}", suggestion=works)
            )
            continue
        if looks_secret(
            name if isinstance(value, str) else "", value if isinstance(value, str | int | float) else text
        ):
            problems.append(secret_problem(field, name.upper()))
    return dict(arguments)


def variables(environment: Mapping[str, Any], problems: Problems) -> dict[str, str]:
    """Environment variables of the ranks, which are stored with the run."""
    for name, value in environment.items():
        field, said = f"environment.{name}", str(value)
        if REFERENCE.search(said):
            works = "Put it into job={'cluster_fields': {'spark_env_vars': {…}}}."
            problem = "is filled in by a cluster's own variables only"
            problems.append(FieldProblem(field=field, value=said, problem=problem, suggestion=works))
        elif looks_secret(name, value):
            problems.append(secret_problem(field, name))
        elif not _VARIABLE.fullmatch(name) or name in _OF_RANKS:
            problem = "is torchrun's to set" if name in _OF_RANKS else "is no name of a variable"
            problems.append(FieldProblem(field=field, value=value, problem=problem, suggestion="Leave it out."))
        elif not isinstance(value, str | int | float):
            problems.append(FieldProblem(field=field, value=value, problem="is no text", suggestion="Write it as one."))
    return {name: str(value) for name, value in environment.items()}


def require_counts(problems: Problems, **counts: Any) -> None:
    """Whole numbers from 1 on."""
    for field, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(
                FieldProblem(field=field, value=value, problem="is no whole number from 1 on", suggestion="Give 1.")
            )


def own_config(given: Any, flags: str, world_size: int | None, problems: Problems) -> dict[str, Any] | None:
    """DeepSpeed's configuration, a mapping or JSON text, with the checker's errors for who reads it."""
    from deepspeed_provider.deepspeed_config.check import check
    from deepspeed_provider.deepspeed_config.findings import Facts, Launcher, Severity

    if flags not in CONFIG_FLAGS:
        problems.append(
            FieldProblem(
                field="config_flags", value=flags, problem="is unknown", suggestion=did_you_mean(flags, CONFIG_FLAGS)
            )
        )
    try:
        config = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        config = given
    if config is None:
        return None
    if not isinstance(config, Mapping):
        works = "Give DeepSpeed's configuration as a mapping."
        problems.append(FieldProblem(field="deepspeed_config", value=given, problem="is no mapping", suggestion=works))
        return None
    launcher = Launcher.HUGGING_FACE if flags == "hf" else Launcher.DEEPSPEED
    problems += [
        FieldProblem(
            field=f"deepspeed_config.{finding.path}".rstrip("."),
            value=finding.value,
            problem=finding.problem.rstrip("."),
            suggestion=finding.suggestion,
        )
        for finding in check(config, Facts(world_size=world_size, launcher=launcher))
        if finding.severity is Severity.ERROR or finding.rule == "secret-in-configuration"
    ]
    return dict(config)


def is_named(function: Any) -> bool:
    """Whether the function is given as ``module:function``."""
    return isinstance(function, str) and _BY_NAME.fullmatch(function) is not None
