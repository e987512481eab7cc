# SPDX-License-Identifier: Apache-2.0
"""Rows of a node-type table, packaged or a user's own: read, checked, laid over each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deepspeed_provider.clusters.gpus import GIB, GIGA, gpu
from deepspeed_provider.clusters.node_type import FRACTIONS, OWN_PRICE, Cloud, NodeType, PriceDoubt, Support
from deepspeed_provider.clusters.prices import price_region, usd_per_dbu
from deepspeed_provider.errors import FieldProblem, SpecError, did_you_mean

BYTES_PER_GBIT: Final = GIGA / 8
# Far beyond all machines there are, and within what numbers can hold in bytes.
LARGEST: Final = 10**9
_MACHINE_PRICES: Final = ("on_demand_usd_per_hour", "spot_usd_per_hour")
_PRICES: Final = (*_MACHINE_PRICES, "dbu_per_hour", "usd_per_dbu")


def _lower(value: Any) -> Any:
    return value.strip().lower().replace("_", "-") if isinstance(value, str) else value


def _names(value: Any) -> Any:
    return tuple(name for name in value.split("|") if name) if isinstance(value, str) else value


Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    cloud: Annotated[Cloud, BeforeValidator(_lower)]
    node_type_id: Annotated[str, Field(min_length=1)]
    aliases: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    gpu: str
    gpus: Count
    cores: Count
    ram_gib: Positive
    nvme_gb: NotNegative = 0
    network_gbps: Positive
    intra_node_gb_per_second: Positive | None = None
    poor_network: bool = False
    dbu_per_hour: Positive | None = None
    usd_per_dbu: NotNegative | None = None
    on_demand_usd_per_hour: Positive | None = None
    spot_usd_per_hour: Positive | None = None
    region: Annotated[str, Field(min_length=1)]
    price_date: Annotated[str, Field(pattern=rf"^(\d{{4}}-\d{{2}}-\d{{2}}|{OWN_PRICE})$")]
    support: Annotated[Support, BeforeValidator(_lower)] = Support.SUPPORTED
    source: str = "your own table"
    notes: str = ""


def parsed(rows: Iterable[Mapping[str, Any]], dbu_usd: Mapping[Cloud, float]) -> tuple[NodeType, ...]:
    """Node types of the rows; ``dbu_usd`` where a row has no price of its own. Raises :class:`SpecError`."""
    problems: list[FieldProblem] = []
    found = [_node_type(dict(row), dbu_usd, problems) for row in rows]
    if problems:
        raise SpecError(problems)
    return tuple(node for node in found if node is not None)


def overridden(found: tuple[NodeType, ...], rows: Iterable[Mapping[str, Any]]) -> tuple[NodeType, ...]:
    """See :func:`deepspeed_provider.clusters.node_types.with_overrides`."""
    problems: list[FieldProblem] = []
    merged = list(found)
    dbu_usd = {cloud: usd_per_dbu(cloud) for cloud in Cloud} | {node.cloud: node.usd_per_dbu for node in found}
    for given in rows:
        row = {name: value for name, value in given.items() if value not in (None, "")}
        if any(name in row for name in _PRICES) and "price_date" not in row:
            row["price_date"] = OWN_PRICE
        named = _named(merged, row)
        there = [place for place in named if row.get("region") in (None, merged[place].region)]
        for place in there:
            node = _mended(merged[place], row, dbu_usd, problems)
            if node is None:
                break
            merged[place] = node
        if not there:
            node = _mended(merged[named[0]] if named else None, row, dbu_usd, problems)
            merged += [node] if node is not None else []
    if problems:
        raise SpecError(problems)
    return tuple(merged)


def _mended(
    old: NodeType | None, row: Mapping[str, Any], dbu_usd: Mapping[Cloud, float], problems: list[FieldProblem]
) -> NodeType | None:
    """With what the row says; None where it has problems, which are added to the list."""
    base = _values(old) if old else {}
    if "gpu" in row:
        base.pop("intra_node_gb_per_second", None)
    node = _node_type({**base, **row}, dbu_usd, problems, old=old)
    return None if node is None else dataclasses.replace(node, price_doubts=_doubts(node, row, old))


def _doubts(node: NodeType, row: Mapping[str, Any], old: NodeType | None) -> frozenset[PriceDoubt]:
    """Which prices the row leaves to the list, beside its own or for another region."""
    elsewhere = node.region != (price_region(node.cloud) if old is None else old.region)
    found = set(old.price_doubts) if old else set()
    if "usd_per_dbu" in row:
        found.discard(PriceDoubt.LISTED_DBU)
    elif elsewhere or any(name in row for name in _PRICES):
        found.add(PriceDoubt.LISTED_DBU)
    if any(name in row for name in _MACHINE_PRICES):
        found.discard(PriceDoubt.OTHER_REGION)
    elif elsewhere:
        found.add(PriceDoubt.OTHER_REGION)
    return frozenset(found)


def _named(nodes: Iterable[NodeType], row: Mapping[str, Any]) -> list[int]:
    """Where they stand, one for each region."""
    cloud, name = _lower(row.get("cloud")), str(row.get("node_type_id"))
    return [place for place, node in enumerate(nodes) if node.cloud == cloud and node.named(name)]


def _values(node: NodeType) -> dict[str, Any]:
    """The row that this node type would come from."""
    kept = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    kept = {name: value for name, value in kept.items() if name in _Row.model_fields}
    return kept | {
        "gpu": node.gpu.name,
        "ram_gib": node.ram_bytes / GIB,
        "nvme_gb": node.nvme_bytes / GIGA,
        "network_gbps": node.network_bytes_per_second / BYTES_PER_GBIT,
        "intra_node_gb_per_second": node.intra_node_bytes_per_second / GIGA,
    }


def _node_type(
    row: dict[str, Any], dbu_usd: Mapping[Cloud, float], problems: list[FieldProblem], *, old: NodeType | None = None
) -> NodeType | None:
    """None where the row has problems, which are added to the list."""
    where = str(row.get("node_type_id", "a row without node_type_id"))
    given = {name: value for name, value in row.items() if value not in (None, "")}
    if old is not None:
        given["node_type_id"] = old.node_type_id
    known = len(problems)
    try:
        read = _Row(**given)
    except ValidationError as error:
        problems += [_problem(where, given, item) for item in error.errors(include_url=False)]
        return None
    problems += _contradictions(read)
    try:
        fitted = gpu(read.gpu)
    except SpecError as error:
        problems += [dataclasses.replace(problem, field=f"{where}.gpu") for problem in error.problems]
    if len(problems) > known:
        return None
    intra = read.intra_node_gb_per_second
    return NodeType(
        cloud=read.cloud,
        node_type_id=read.node_type_id,
        aliases=read.aliases,
        gpu=fitted,
        gpus=read.gpus,
        cores=read.cores,
        ram_bytes=round(read.ram_gib * GIB),
        nvme_bytes=round(read.nvme_gb * GIGA),
        network_bytes_per_second=read.network_gbps * BYTES_PER_GBIT,
        intra_node_bytes_per_second=(
            intra * GIGA if intra else fitted.nvlink_bytes_per_second or fitted.pcie_bytes_per_second
        ),
        poor_network=read.poor_network,
        dbu_per_hour=read.dbu_per_hour,
        usd_per_dbu=dbu_usd[read.cloud] if read.usd_per_dbu is None else read.usd_per_dbu,
        on_demand_usd_per_hour=read.on_demand_usd_per_hour,
        spot_usd_per_hour=read.spot_usd_per_hour,
        region=read.region,
        price_date=read.price_date,
        source=read.source,
        support=read.support,
        notes=read.notes,
    )


def _contradictions(row: _Row) -> list[FieldProblem]:
    problems = []
    fraction = FRACTIONS.get(row.node_type_id.casefold())
    if fraction is not None:
        problems.append(
            FieldProblem(
                field=f"{row.node_type_id}.gpus",
                value=row.gpus,
                problem=f"it has {fraction}, and CUDA jobs cannot be planned on a part of a GPU",
                suggestion="Standard_NV36ads_A10_v5 has a whole one.",
            )
        )
    launchable = row.support in (Support.SUPPORTED, Support.DBU_ONLY)
    if launchable and row.dbu_per_hour is None:
        problems.append(_unpriced(row, "dbu_per_hour", "a type that can be launched needs its DBU per hour"))
    if launchable and row.on_demand_usd_per_hour is None and row.spot_usd_per_hour is None:
        problems.append(_unpriced(row, "on_demand_usd_per_hour", "a type that can be launched needs a price"))
    return problems


def _unpriced(row: _Row, name: str, problem: str) -> FieldProblem:
    return FieldProblem(
        field=f"{row.node_type_id}.{name}",
        value=None,
        problem=problem,
        suggestion="Give it, or support = no-evidence.",
    )


def _problem(where: str, given: Mapping[str, Any], error: Mapping[str, Any]) -> FieldProblem:
    name = str(error["loc"][0])
    if name not in _Row.model_fields:
        problem = "there is no such column"
        hint = did_you_mean(name, _Row.model_fields)
    elif error["type"] == "missing":
        problem, hint = "is needed for a type that the catalogue does not have", ""
    else:
        problem, hint = str(error["msg"]).removeprefix("Input ").removeprefix("Value error, "), ""
    return FieldProblem(field=f"{where}.{name}", value=given.get(name), problem=problem, suggestion=hint)
