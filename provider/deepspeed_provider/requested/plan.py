# SPDX-License-Identifier: Apache-2.0
"""One request for a plan, from the command line or a DAG: checked once, all problems at once."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, TypeVar

from deepspeed_provider.clusters.cluster_body import RunIdentity
from deepspeed_provider.clusters.gpu_plan import GpuPlan, gpu_plan
from deepspeed_provider.clusters.job import Constraints, Job, Objective
from deepspeed_provider.clusters.node_types import Cloud, NodeType, Tier, node_types, with_overrides
from deepspeed_provider.clusters.runtimes import offered_runtime
from deepspeed_provider.clusters.wire import plan_as_json
from deepspeed_provider.clusters.workspace import WorkspaceOffers
from deepspeed_provider.errors import FieldProblem, SpecError, did_you_mean, nearest, tried
from deepspeed_provider.requested.cluster import CLUSTER_OPTIONS, asked_settings
from deepspeed_provider.requested.estimate import asked_model, asked_options
from deepspeed_provider.requested.files import read_answer, rows_of
from deepspeed_provider.requested.model_source import Model, ModelSource, parse_parameter_count
from deepspeed_provider.sizing.options import Attention, Method, TrainingOptions
from deepspeed_provider.sizing.weights import weights

EFFECTIVE_BATCH_SIZE: Final = 64
MOST_NODES: Final = 64
MOST_SEQUENCES: Final = 2**20
MOST_ROWS: Final = 1000

# What the search does not choose, and the generated configuration does not fix.
JOB_OPTIONS: Final = (
    *("method", "optimizer", "sequence_length", "attention", "loss", "padding", "holds_outputs", "load_in_turn"),
    *("lora_rank", "lora_targets", "lora_dropout", "adapter_precision"),
    *("double_quant", "quant_storage", "upcast_unquantized"),
)
KEYS: Final = (
    *("model", "parameters", "tokens", "rows", "effective_batch_size", *JOB_OPTIONS),
    *("cloud", "region", "node_type", "min_compute_capability", "max_nodes", "spot", "tier"),
    *("catalog", "workspace_node_types"),
    *CLUSTER_OPTIONS,
    *("objective", "max_usd_per_hour", "budget_usd", "deadline_hours", "top"),
)

# Before the field of a row in a user's own table.
CATALOG_FIELD: Final = "catalog."

T = TypeVar("T")
Kind = TypeVar("Kind", bound=StrEnum)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedJob:
    """What is trained, the model's name, and what was taken for granted where nothing was said."""

    model: str
    job: Job
    assumptions: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, the model that it is of, and what was taken for granted where nothing was said."""

    model: str
    plan: GpuPlan
    assumptions: tuple[str, ...]


def planned(
    values: Mapping[str, Any],
    source: ModelSource,
    run: RunIdentity | None = None,
    offers: WorkspaceOffers | None = None,
) -> Planned:
    """``values``: options by their names; None is as if not given. ``run``: by which the cluster is tagged.

    ``offers``: of a workspace that was asked, to which node types and runtime are then restricted. ``catalog`` and
    ``workspace_node_types`` are paths, or what stands in such files. Raises :class:`SpecError` with all problems.
    """
    given = {name: value for name, value in values.items() if value is not None}
    problems = [unknown_option(name, value, KEYS) for name, value in given.items() if name not in KEYS]
    asked = tried(lambda: asked_job(given, source), problems)
    top = tried(lambda: _whole(given, "top", 10, most=MOST_ROWS), problems)
    objective = tried(lambda: _chosen(given, "objective", Objective), problems) or Objective.COST
    catalogue = tried(lambda: catalogue_of(given), problems)
    workspace = tried(lambda: _workspace(given, offers), problems)
    constraints = tried(lambda: _constraints(given, catalogue), problems)
    settings = tried(lambda: asked_settings(given, run), problems)
    warnings: tuple[str, ...] = ()
    if offers is not None and settings is not None:
        attention = Attention.SDPA if asked is None else asked.job.options.attention
        key, had = settings.spark_version, offers.spark_versions
        if found := tried(lambda: offered_runtime(key, attention, had), problems):
            settings, warnings = dataclasses.replace(settings, spark_version=found[0].spark_version), found[1]
    if problems or asked is None or top is None or catalogue is None or constraints is None:
        raise SpecError(problems)
    plan = gpu_plan(
        asked.job,
        catalogue,
        constraints,
        objective=objective,
        top=top,
        workspace=workspace,
        settings=settings,
        tier=_tier(given),
    )
    plan = dataclasses.replace(plan, warnings=(*warnings, *plan.warnings))
    return Planned(model=asked.model, plan=plan, assumptions=(*asked.assumptions, *plan.assumptions))


def asked_job(given: Mapping[str, Any], source: ModelSource) -> AskedJob:
    """By the options under "What is trained". Raises :class:`SpecError` with all their problems."""
    problems: list[FieldProblem] = []
    model = tried(lambda: asked_model(given, source), problems)
    known = 0 if model is None else model.architecture.max_positions
    length, shortened = _length(given, known)
    options = tried(
        lambda: asked_options({name: given[name] for name in JOB_OPTIONS if name in given} | length), problems
    )
    if model is not None and options is not None:
        tried(lambda: _require_positions(model, options), problems)
    amount = tried(lambda: _amount(given), problems)
    batch = tried(lambda: _whole(given, "effective_batch_size", EFFECTIVE_BATCH_SIZE, most=MOST_SEQUENCES), problems)
    if model is not None and options is not None:
        tried(lambda: weights(model.architecture, options), problems)
    if problems or model is None or options is None or amount is None or batch is None:
        raise SpecError(problems)
    tokens, assumptions = _tokens(amount, options)
    assumptions += shortened
    if "effective_batch_size" not in given:
        assumptions.append(f"The effective batch is {batch} sequences.")
    job = Job(architecture=model.architecture, options=options, tokens=tokens, effective_batch_size=batch)
    return AskedJob(model=model.name, job=job, assumptions=tuple(assumptions))


def planned_as_json(found: Planned) -> dict[str, Any]:
    """What ``plan --json`` prints, and a DAG hands on: the plan with its model and method."""
    return {
        **training_as_json(found.model, found.plan.job),
        **plan_as_json(found.plan),
        "assumptions": list(found.assumptions),
    }


def training_as_json(model: str, job: Job) -> dict[str, Any]:
    """``lora_rank`` is None for a full fine-tune."""
    options = job.options
    return {
        "model": model,
        "method": options.method.value,
        "lora_rank": None if options.method is Method.FULL else options.lora_rank,
        "optimizer": options.optimizer.value,
    }


def unknown_option(name: str, value: object, known: Iterable[str]) -> FieldProblem:
    works = did_you_mean(name, known)
    return FieldProblem(field=name, value=value, problem="there is no such option", suggestion=works)


def catalogue_of(given: Mapping[str, Any]) -> tuple[NodeType, ...]:
    """The packaged catalogue with the rows of the user's own file. Raises :class:`SpecError`."""
    problems: list[FieldProblem] = []
    tier = tried(lambda: _tier(given), problems) or Tier.PREMIUM
    rows = tried(lambda: rows_of(given["catalog"]), problems) if "catalog" in given else []
    if problems:
        raise SpecError(problems)
    found = node_types(tier=tier)
    if not rows:
        return found
    try:
        return with_overrides(found, rows)
    except SpecError as error:
        named = [dataclasses.replace(one, field=f"{CATALOG_FIELD}{one.field}") for one in error.problems]
        raise SpecError(named) from None


def _tier(given: Mapping[str, Any]) -> Tier:
    return _chosen(given, "tier", Tier) or Tier.PREMIUM


def asked_cloud(given: Mapping[str, Any]) -> Cloud | None:
    """By ``cloud``. Raises :class:`SpecError`."""
    return _chosen(given, "cloud", Cloud)


def _amount(given: Mapping[str, Any]) -> tuple[str, int]:
    """``tokens`` or ``rows``, and how many."""
    named = [name for name in ("tokens", "rows") if name in given]
    if not named:
        raise SpecError.of("tokens", None, "is missing", "Give the tokens of the whole run, such as 50M, or its rows.")
    if len(named) > 1:
        raise SpecError.of("rows", given["rows"], "says the same as tokens", "Give one of them.")
    name = named[0]
    try:
        count = parse_parameter_count(given[name])
    except SpecError:
        count = 0
    if count < 1:
        raise SpecError.of(name, given[name], f"is no number of {name}", "Use a number such as 50M, 2e6 or 10000.")
    return name, count


def _length(given: Mapping[str, Any], known: int) -> tuple[dict[str, int], list[str]]:
    """The sequence length of a model that knows fewer positions than the usual one, where none was asked for."""
    name = "sequence_length"
    if name in given or not 0 < known < TrainingOptions.model_fields[name].default:
        return {}, []
    return {name: known}, [f"The sequence length is {known:,}, all the positions that the model knows."]


def _require_positions(model: Model, options: TrainingOptions) -> None:
    """Learned positions end; a longer sequence fails at the first step."""
    architecture, length = model.architecture, options.sequence_length
    if architecture.position_rows and length > architecture.max_positions:
        text = f"is beyond the {architecture.max_positions:,} positions that {model.name} has learned"
        raise SpecError.of("sequence_length", length, text, f"Use at most {architecture.max_positions:,}.")


def _tokens(amount: tuple[str, int], options: TrainingOptions) -> tuple[int, list[str]]:
    name, count = amount
    if name == "tokens":
        return count, []
    tokens = count * options.sequence_length
    return tokens, [f"{count:,} rows of {options.sequence_length:,} tokens each, padding included: {tokens:,} tokens."]


def _constraints(given: Mapping[str, Any], catalogue: Sequence[NodeType] | None) -> Constraints:
    problems: list[FieldProblem] = []
    cloud = tried(lambda: asked_cloud(given), problems)
    known = [node for node in catalogue or () if cloud is None or node.cloud is cloud]
    region = tried(lambda: _region(given, known), problems) if known else None
    ids = tried(lambda: _ids(given, known), problems) if known else None
    most = tried(lambda: _whole(given, "max_nodes", Constraints().max_nodes, most=MOST_NODES), problems)
    usd_per_hour = tried(lambda: _positive(given, "max_usd_per_hour"), problems)
    budget_usd = tried(lambda: _positive(given, "budget_usd"), problems)
    deadline_hours = tried(lambda: _positive(given, "deadline_hours"), problems)
    capability = tried(lambda: _capability(given), problems)
    spot = tried(lambda: asked_switch(given, "spot"), problems)
    if problems or most is None:
        raise SpecError(problems)
    return Constraints(
        clouds=frozenset([cloud] if cloud else []),
        regions=frozenset([region] if region else []),
        node_type_ids=frozenset(ids or ()),
        max_nodes=most,
        spot=bool(spot),
        min_compute_capability=capability,
        max_usd_per_hour=usd_per_hour,
        budget_usd=budget_usd,
        deadline_hours=deadline_hours,
    )


def _capability(given: Mapping[str, Any]) -> tuple[int, int] | None:
    name = "min_compute_capability"
    if name not in given:
        return None
    match = re.fullmatch(r"([0-9]{1,2})(?:\.([0-9]))?", str(given[name]).strip())
    if match is None:
        raise SpecError.of(name, given[name], "is no compute capability", "Use 8.0 for Ampere and later, with bf16.")
    return int(match[1]), int(match[2] or 0)


def _region(given: Mapping[str, Any], known: Sequence[NodeType]) -> str | None:
    asked = given.get("region")
    regions = sorted({node.region for node in known})
    if asked is None or asked in regions:
        return asked
    works = f"Known are {', '.join(regions)}; prices of another region come with --catalog."
    raise SpecError.of("region", asked, "there are no prices of it", works)


def _ids(given: Mapping[str, Any], known: Sequence[NodeType]) -> list[str]:
    """Node types by their ids or by how these begin: ``p4d``, ``Standard_NC``."""
    found: list[str] = []
    problems: list[FieldProblem] = []
    for asked in given.get("node_type") or ():
        exact = [node.node_type_id for node in known if node.named(asked)]
        begun = [node.node_type_id for node in known if node.node_type_id.casefold().startswith(asked.casefold())]
        found += exact or begun
        if not asked or not (exact or begun):
            near = nearest(asked, [node.node_type_id for node in known], cutoff=0.3)
            works = f"Did you mean {near!r}?" if near else "`deepspeed-provider catalog show` lists them."
            text = "no node type there is called so, or begins so"
            problems.append(FieldProblem(field="node_type", value=asked, problem=text, suggestion=works))
    if problems:
        raise SpecError(problems)
    return found


def _chosen(given: Mapping[str, Any], name: str, kind: type[Kind]) -> Kind | None:
    if name not in given:
        return None
    asked = str(given[name]).strip().lower()
    values = [item.value for item in kind]
    if asked in values:
        return kind(asked)
    near = nearest(asked, values, cutoff=0.4) or values[0]
    raise SpecError.of(name, given[name], f"should be one of {', '.join(values)}", f"Try {near!r}.")


def _whole(given: Mapping[str, Any], name: str, default: int, *, most: int) -> int:
    if name not in given:
        return default
    try:
        number = int(str(given[name]))
    except ValueError:
        number = 0
    if not 1 <= number <= most:
        raise SpecError.of(
            name, given[name], f"should be a whole number from 1 to {most:,}", f"The default is {default}."
        )
    return number


def asked_switch(given: Mapping[str, Any], name: str) -> bool:
    """Also as a word, as a form and a template give it. Raises :class:`SpecError`."""
    words = {"true": True, "false": False}
    asked = str(given.get(name, False)).strip().lower()
    if asked not in words:
        raise SpecError.of(name, given[name], "should be true or false", "Leave it out for false.")
    return words[asked]


def _positive(given: Mapping[str, Any], name: str) -> float | None:
    if name not in given:
        return None
    try:
        number = float(str(given[name]))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise SpecError.of(name, given[name], "should be a number above 0", "Leave it out for no limit.")
    return number


def _workspace(given: Mapping[str, Any], offers: WorkspaceOffers | None) -> Mapping[str, Any] | None:
    name = "workspace_node_types"
    if offers is None:
        return read_answer(given[name], name) if name in given else None
    if name in given:
        shown = given[name] if isinstance(given[name], str) else "(its content)"
        text = "is a saved answer, and the workspace itself was asked"
        raise SpecError.of(name, shown, text, "Leave it out, or databricks_conn_id.")
    return read_answer(offers.node_types, "databricks_conn_id")
