# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider catalog``: the GPUs and node types that are known, and what a workspace has of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepspeed_provider.cli_plan import option
from deepspeed_provider.cli_problems import tell
from deepspeed_provider.cli_report import GIB, print_list
from deepspeed_provider.cli_workspace import asked_node_types, save_answer
from deepspeed_provider.clusters.gpus import GIGA, TERA, Gpu, gpus
from deepspeed_provider.clusters.gpus import gpu as gpu_named
from deepspeed_provider.clusters.node_type import OWN_PRICE
from deepspeed_provider.clusters.node_types import NodeType, Support, WorkspaceTypes, restricted
from deepspeed_provider.clusters.wire import node_type_as_json
from deepspeed_provider.errors import FieldProblem, SpecError, tried
from deepspeed_provider.requested.files import read_answer
from deepspeed_provider.requested.plan import asked_cloud, catalogue_of

catalog_app = typer.Typer(no_args_is_help=True, help="GPUs and node types with their prices.")

PANEL: Final = "Options"
# In place of a price.
_SUPPORT: Final = {Support.RETIRED: "retired", Support.NO_EVIDENCE: "unnamed"}
# Columns of a terminal that takes all of a row.
WIDE: Final = 100


@catalog_app.command("show")
def catalog_show(
    cloud: Annotated[str | None, option("NAME", "aws, azure or gcp. (default: all)", PANEL)] = None,
    gpu: Annotated[str | None, option("NAME", "Only types with this GPU.", PANEL)] = None,
    catalog: Annotated[str | None, option("FILE", "Your own rows, as CSV or JSON.", PANEL)] = None,
    tier: Annotated[str | None, option("NAME", "Of the workspace: premium or enterprise.", PANEL)] = None,
    only_gpus: Annotated[
        bool, option("", "List instead the GPUs that are known: rows of your own name one of them.", PANEL, "--gpus")
    ] = False,
    as_json: Annotated[bool, option("", "Print one JSON object.", PANEL, "--json")] = False,
) -> None:
    """List node types with what they hold, GiB of each GPU and of RAM, and what an hour costs with Databricks' units.

    In place of a price: "retired" can no longer be launched, "unnamed" is not named by Databricks.

    With --gpus: peak TFLOP/s in 16 bits, GB/s of memory and NVLink, the share of the peak that matrix products reach.
    """
    asked = {"cloud": cloud, "gpu": gpu, "catalog": catalog, "tier": tier}
    try:
        found = _asked(asked)
    except SpecError as error:
        tell(error, asked, as_json=as_json)
        raise typer.Exit(2) from None
    if only_gpus:
        _show_gpus(_gpus_of(found, asked), as_json=as_json)
    elif as_json:
        typer.echo(json.dumps({"node_types": [node_type_as_json(node) for node in found]}, allow_nan=False))
    else:
        _print_catalogue(Console(), found)


@catalog_app.command("diff")
def catalog_diff(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The workspace's saved answer to list-node-types.")],
    cloud: Annotated[str | None, option("NAME", "Of the workspace. (default: that of most types)", PANEL)] = None,
    catalog: Annotated[str | None, option("FILE", "Your own rows, as CSV or JSON.", PANEL)] = None,
    as_json: Annotated[bool, option("", "Print one JSON object.", PANEL, "--json")] = False,
) -> None:
    """Compare the catalogue with a workspace: what it can launch, what it lacks, what the catalogue does not know."""
    _show_diff(lambda: read_answer(file, "FILE"), {"cloud": cloud, "catalog": catalog}, as_json=as_json)


@catalog_app.command("refresh")
def catalog_refresh(
    conn_id: Annotated[
        str, option("ID", "Airflow's connection of type databricks. (default: databricks_default)", PANEL)
    ] = "databricks_default",
    save: Annotated[
        str | None, option("FILE", "Keep the answer, for `catalog diff` and `plan --workspace-node-types`.", PANEL)
    ] = None,
    cloud: Annotated[str | None, option("NAME", "Of the workspace. (default: that of most types)", PANEL)] = None,
    catalog: Annotated[str | None, option("FILE", "Your own rows, as CSV or JSON.", PANEL)] = None,
    as_json: Annotated[bool, option("", "Print one JSON object.", PANEL, "--json")] = False,
) -> None:
    """Ask a workspace for its node types, and compare the catalogue with them as `catalog diff` does."""

    def ask() -> Mapping[str, Any]:
        answer = asked_node_types(conn_id)
        if save is not None:
            save_answer(answer, save)
        return answer

    asked = {"cloud": cloud, "catalog": catalog, "conn_id": conn_id, "save": save}
    _show_diff(ask, asked, as_json=as_json)


def _show_diff(answer: Callable[[], Mapping[str, Any]], asked: dict[str, str | None], *, as_json: bool) -> None:
    try:
        seen = _seen(answer, asked)
    except SpecError as error:
        tell(error, asked, as_json=as_json)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(_diff_as_json(seen), allow_nan=False))
    else:
        _print_diff(Console(), seen)


def _asked(asked: dict[str, str | None]) -> list[NodeType]:
    problems: list[FieldProblem] = []
    given = {name: value for name, value in asked.items() if value is not None}
    cloud = tried(lambda: asked_cloud(given), problems)
    wanted = tried(lambda: gpu_named(given["gpu"]), problems) if "gpu" in given else None
    catalogue = tried(lambda: catalogue_of(given), problems)
    if problems or catalogue is None:
        raise SpecError(problems)
    return [
        node for node in catalogue if (cloud is None or node.cloud is cloud) and (wanted is None or node.gpu == wanted)
    ]


def _gpus_of(found: Sequence[NodeType], asked: Mapping[str, str | None]) -> list[Gpu]:
    """Those of a cloud are those of its node types; a GPU that no node type has is known all the same."""
    if asked["cloud"] is not None:
        return [one for one in gpus() if any(node.gpu == one for node in found)]
    return [one for one in gpus() if asked["gpu"] is None or one == gpu_named(asked["gpu"])]


def _seen(read: Callable[[], Mapping[str, Any]], asked: dict[str, str | None]) -> WorkspaceTypes:
    """A workspace is in one cloud: what the others have is nothing that it lacks."""
    problems: list[FieldProblem] = []
    answer = tried(read, problems)
    node_types = tried(lambda: _asked(asked), problems)
    if problems or answer is None or node_types is None:
        raise SpecError(problems)
    seen = restricted(node_types, answer)
    if asked["cloud"] is not None or not seen.available:
        return seen
    clouds = [node.cloud for node in seen.available]
    home = max(sorted(set(clouds)), key=clouds.count)
    return restricted([node for node in node_types if node.cloud is home], answer)


def _diff_as_json(seen: WorkspaceTypes) -> dict[str, Any]:
    return {
        "available": [node.node_type_id for node in seen.available],
        "missing": [{"node_type_id": name, "reason": reason} for name, reason in seen.missing.items()],
        "unknown": list(seen.unknown_gpu_types),
        "warnings": list(seen.warnings),
    }


def _print_diff(console: Console, seen: WorkspaceTypes) -> None:
    lacks: dict[str, list[str]] = {}
    for name, reason in seen.missing.items():
        lacks.setdefault(reason, []).append(name)
    print_list(console, "Known, and can be launched", [", ".join(node.node_type_id for node in seen.available)], "")
    lines = [f"{reason}: {', '.join(names)}" for reason, names in lacks.items()]
    print_list(console, "In the catalogue, but not to be had in this workspace", lines, "")
    title = (
        "GPU types of this workspace that the catalogue does not know; a row of your own (--catalog) adds one whose "
        "GPU `catalog show --gpus` lists"
    )
    print_list(console, title, seen.unknown_gpu_types, "yellow")
    print_list(console, "Warnings", seen.warnings, "yellow")


def _print_catalogue(console: Console, found: list[NodeType]) -> None:
    """A table for each list of prices."""
    lists: dict[tuple[str, str, str], list[NodeType]] = {}
    for node in found:
        lists.setdefault((node.cloud.value, node.region, node.price_date), []).append(node)
    for (cloud, region, date), nodes in lists.items():
        priced = date if date == OWN_PRICE else f"prices of {date}"
        console.print(_table(f"{cloud}, {region}, {priced}", nodes, wide=console.width >= WIDE))


def _table(title: str, found: list[NodeType], *, wide: bool) -> Table:
    gap = (0, 1) if wide else (0, 0)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=gap)
    table.add_column("Node type", no_wrap=True)
    table.add_column("GPUs", no_wrap=True)
    more = ("Cores", "NVMe GB", "Gbit/s", "DBU/h") if wide else ()
    for name in ("GiB", "RAM", "$/h", "Spot", *more):
        table.add_column(name, justify="right", no_wrap=True)
    for node in found:
        table.add_row(*_cells(node, wide=wide))
    return table


def _cells(node: NodeType, *, wide: bool) -> list[str | Text]:
    cells: list[str | Text] = [
        Text(node.node_type_id),
        Text(f"{node.gpus} {node.gpu.name}"),
        f"{node.gpu.memory_bytes / GIB:,.1f}",
        f"{node.ram_bytes / GIB:,.0f}",
        _usd(node.usd_per_hour() if node.priced() else None) if node.launchable else _SUPPORT[node.support],
        _usd(node.usd_per_hour(spot=True) if node.priced(spot=True) else None),
    ]
    if wide:
        cells += [
            str(node.cores),
            f"{node.nvme_bytes / GIGA:,.0f}",
            f"{node.network_bytes_per_second * 8 / GIGA:,.0f}",
            _usd(node.dbu_per_hour),
        ]
    return cells


def _show_gpus(found: Sequence[Gpu], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"gpus": [_gpu_as_json(one) for one in found]}, allow_nan=False))
        return
    console = Console()
    for date in dict.fromkeys(one.date for one in found):
        rows = [one for one in found if one.date == date]
        console.print(_gpu_table(f"GPUs, by data sheets as of {date}", rows, wide=console.width >= WIDE))


def _gpu_as_json(found: Gpu) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "compute_capability": _capability(found)}


def _gpu_table(title: str, found: Sequence[Gpu], *, wide: bool) -> Table:
    gap = (0, 1) if wide else (0, 0)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=gap)
    table.add_column("GPU", no_wrap=True)
    for name in ("GiB", "CC", "bf16", "TFLOP/s", "GB/s", "NVLink", "Share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Share from")
    for one in found:
        table.add_row(*_gpu_cells(one))
    return table


def _gpu_cells(found: Gpu) -> list[str | Text]:
    return [
        Text(found.name),
        f"{found.memory_bytes / GIB:,.1f}",
        _capability(found),
        "yes" if found.bf16 else "no",
        f"{found.dense_flops_16bit / TERA:,.0f}",
        f"{found.memory_bytes_per_second / GIGA:,.0f}",
        f"{found.nvlink_bytes_per_second / GIGA:,.0f}" if found.nvlink_bytes_per_second else "",
        f"{found.matmul_share:.0%}",
        Text(found.matmul_source),
    ]


def _capability(found: Gpu) -> str:
    return ".".join(map(str, found.compute_capability))


def _usd(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"
