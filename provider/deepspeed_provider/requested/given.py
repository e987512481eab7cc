# SPDX-License-Identifier: Apache-2.0
"""One request for a plan on hardware that is there: an existing cluster, a Spark Connect server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from deepspeed_provider.clusters.given_plan import GivenPlan, given_plan
from deepspeed_provider.clusters.gpus import GIB, Gpu, gpu
from deepspeed_provider.clusters.hardware import INTERCONNECT_GBPS, RAM_BYTES_PER_GPU, Hardware
from deepspeed_provider.clusters.wire import given_plan_as_json
from deepspeed_provider.errors import FieldProblem, SpecError, tried
from deepspeed_provider.requested.cluster import CLUSTER_OPTIONS
from deepspeed_provider.requested.model_source import ModelSource
from deepspeed_provider.requested.plan import KEYS, asked_job, asked_switch, training_as_json, unknown_option

GIVEN_OPTIONS: Final = ("gpu", "gpus_per_node", "nodes", "ram_gib", "nvme_gib", "interconnect_gbps", "usd_per_hour")
# What only a search among node types asks for.
SEARCH_OPTIONS: Final = (
    *("cloud", "region", "node_type", "min_compute_capability", "max_nodes", "spot", "tier"),
    *("catalog", "workspace_node_types"),
    *("objective", "max_usd_per_hour", "budget_usd", "deadline_hours"),
    *CLUSTER_OPTIONS,
    *("top", "all"),
)
# Before the names of its options in a DAG.
HARDWARE: Final = "hardware."
# Of a workspace that is asked what it has.
CONNECTION: Final = "databricks_conn_id"
MOST_GPUS_PER_NODE: Final = 64
MOST_NODES: Final = 1024
# Beyond all machines there are.
LARGEST: Final = 10**6


@dataclass(frozen=True, kw_only=True)
class PlannedOnGiven:
    """A plan on given hardware, the model that it is of, and what was taken for granted where nothing was said."""

    model: str
    plan: GivenPlan
    assumptions: tuple[str, ...]


def describes_hardware(values: Mapping[str, Any]) -> bool:
    """Whether any of it is said, be it enough or not."""
    return any(values.get(name) is not None for name in GIVEN_OPTIONS)


def planned_on_given(values: Mapping[str, Any], source: ModelSource) -> PlannedOnGiven:
    """``values``: options by their names; None, and False for a switch, are as if not given.

    Raises :class:`SpecError` with all problems.
    """
    described = {name: values.get(name) for name in GIVEN_OPTIONS}
    others = {name: value for name, value in values.items() if name not in GIVEN_OPTIONS}
    return _planned(others, described, source, [])


def planned_on_hardware(values: Mapping[str, Any], hardware: Mapping[str, Any], source: ModelSource) -> PlannedOnGiven:
    """As :func:`planned_on_given`, for a DAG: ``hardware`` stands apart, and what is no option is a problem too."""
    problems = [
        _of_a_search(name, value) if name == CONNECTION else unknown_option(name, value, KEYS)
        for name, value in values.items()
        if value is not None and name not in (*KEYS, *SEARCH_OPTIONS)
    ]
    return _planned(values, hardware, source, problems, where=HARDWARE)


def described_hardware(hardware: Mapping[str, Any], where: str = HARDWARE) -> tuple[Hardware, float | None]:
    """The machines, and the price of an hour of all of them. Raises :class:`SpecError` with all problems."""
    given = {name: value for name, value in hardware.items() if value is not None}
    problems = [
        unknown_option(name, value, GIVEN_OPTIONS) for name, value in given.items() if name not in GIVEN_OPTIONS
    ]
    found = tried(lambda: _hardware(given), problems)
    works = "Give the price of all nodes together in USD, or leave it out."
    usd_per_hour = tried(lambda: _number(given, "usd_per_hour", works, least=0), problems)
    if problems or found is None:
        raise SpecError([replace(problem, field=f"{where}{problem.field}") for problem in problems])
    return found, usd_per_hour


def _planned(
    values: Mapping[str, Any],
    described: Mapping[str, Any],
    source: ModelSource,
    problems: list[FieldProblem],
    *,
    where: str = "",
) -> PlannedOnGiven:
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    if "spot" in given and tried(lambda: asked_switch(given, "spot"), []) is False:
        given.pop("spot")
    searched = [_of_a_search(name, given[name]) for name in SEARCH_OPTIONS if name in given]
    # Where there is a command line, a switch has no value.
    problems += [replace(each, value=given[each.field]) if where and each.value is None else each for each in searched]
    asked = tried(lambda: asked_job(given, source), problems)
    found = tried(lambda: described_hardware(described, where), problems)
    if problems or asked is None or found is None:
        raise SpecError(problems)
    hardware, usd_per_hour = found
    plan = given_plan(asked.job, hardware, usd_per_hour=usd_per_hour)
    assumptions = (*asked.assumptions, *_taken(described, hardware), *plan.assumptions)
    return PlannedOnGiven(model=asked.model, plan=plan, assumptions=assumptions)


def planned_on_given_as_json(found: PlannedOnGiven) -> dict[str, Any]:
    """What ``plan --json`` prints: the plan with its model and method."""
    return {
        **training_as_json(found.model, found.plan.job),
        **given_plan_as_json(found.plan),
        "assumptions": list(found.assumptions),
    }


def _of_a_search(name: str, value: object) -> FieldProblem:
    if name in ("catalog", "workspace_node_types") and not isinstance(value, str):
        value = "(its content)"
    elif isinstance(value, list):
        value = ", ".join(map(str, value))
    return FieldProblem(
        field=name,
        value=None if value is True else value,
        problem="is for machines that are yet to be chosen, and the hardware is given",
        suggestion="Leave it out, or leave out what describes the hardware.",
    )


def _hardware(given: Mapping[str, Any]) -> Hardware:
    problems: list[FieldProblem] = []
    named = tried(lambda: _gpu(given), problems)
    gpus = tried(lambda: _whole(given, "gpus_per_node", most=MOST_GPUS_PER_NODE), problems)
    nodes = tried(lambda: _whole(given, "nodes", 1, most=MOST_NODES), problems)
    works = f"The default is {RAM_BYTES_PER_GPU // GIB} for each GPU."
    ram = tried(lambda: _number(given, "ram_gib", works), problems)
    nvme = tried(lambda: _number(given, "nvme_gib", "Leave it out for none.", least=0), problems)
    interconnect = tried(
        lambda: _number(given, "interconnect_gbps", f"The default is {INTERCONNECT_GBPS} Gbit/s."), problems
    )
    if problems or named is None or gpus is None or nodes is None:
        raise SpecError(problems)
    return Hardware.given(
        gpu=named,
        gpus_per_node=gpus,
        nodes=nodes,
        interconnect_gbps=interconnect,
        ram_bytes_per_node=None if ram is None else int(ram * GIB),
        nvme_bytes_per_node=int((nvme or 0) * GIB),
    )


def _gpu(given: Mapping[str, Any]) -> Gpu:
    if "gpu" not in given:
        raise SpecError.of("gpu", None, "is missing", "Name the GPU that the nodes have, such as A100-80GB.")
    return gpu(str(given["gpu"]))


def _whole(given: Mapping[str, Any], name: str, default: int | None = None, *, most: int) -> int:
    if name not in given:
        if default is None:
            raise SpecError.of(name, None, "is missing", "Give the number of GPUs that each node has.")
        return default
    try:
        number = float(str(given[name]))
    except ValueError:
        number = math.nan
    if not 1 <= number <= most or not number.is_integer():
        works = f"Give the number of {'GPUs that each node has' if default is None else 'nodes'}."
        raise SpecError.of(name, given[name], f"should be a whole number from 1 to {most:,}", works)
    return int(number)


def _number(given: Mapping[str, Any], name: str, works: str, *, least: float | None = None) -> float | None:
    """Above 0, or from ``least`` on."""
    if name not in given:
        return None
    try:
        number = float(str(given[name]))
    except ValueError:
        number = math.nan
    if not (number > 0 or number == least) or number > LARGEST:
        from_least = "above 0 and" if least is None else f"from {least:g} on,"
        raise SpecError.of(name, given[name], f"should be a number {from_least} at most {LARGEST:,}", works)
    return number


def _taken(given: Mapping[str, Any], hardware: Hardware) -> list[str]:
    """What was not said of the hardware."""
    stated = []
    if given.get("ram_gib") is None:
        stated.append(f"Each node has {hardware.ram_bytes_per_node // GIB:,} GiB of RAM (ram_gib).")
    if given.get("nvme_gib") is None:
        stated.append("No node has an NVMe drive for offload (nvme_gib).")
    if given.get("interconnect_gbps") is None and hardware.nodes > 1:
        stated.append(f"{INTERCONNECT_GBPS} Gbit/s from one node to the others (interconnect_gbps).")
    return stated
