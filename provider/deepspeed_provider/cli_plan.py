# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider plan``: which machines for a fine-tune, or how on those that are there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console

from deepspeed_provider.cli_options import with_training_options
from deepspeed_provider.cli_plan_report import print_on_given, print_plan
from deepspeed_provider.cli_problems import tell
from deepspeed_provider.clusters.cluster_body import ClusterSettings
from deepspeed_provider.clusters.hardware import INTERCONNECT_GBPS, RAM_BYTES_PER_GPU
from deepspeed_provider.clusters.job import Constraints
from deepspeed_provider.errors import SpecError
from deepspeed_provider.requested.given import describes_hardware, planned_on_given, planned_on_given_as_json
from deepspeed_provider.requested.model_source import ModelSource, hub_fetch
from deepspeed_provider.requested.plan import EFFECTIVE_BATCH_SIZE, JOB_OPTIONS, planned, planned_as_json

WHAT = "What is trained"
WHERE = "Where it may run"
GIVEN = "Hardware that is there"
LIMITS = "Limits"
CLUSTER = "Cluster"
OUTPUT = "Output"


def option(metavar: str, text: str, panel: str, *names: str) -> Any:
    """A typer option; values arrive as they were typed, so that all problems are told together."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, show_default=False)


@partial(with_training_options, fields=JOB_OPTIONS)
def plan(
    model: Annotated[
        str | None, option("MODEL", "A bundled model's name, a config.json or its folder, or a hub id.", WHAT)
    ] = None,
    parameters: Annotated[str | None, option("N", "Instead of a model, its parameters: 7B, 350M.", WHAT)] = None,
    download: Annotated[bool, option("", "Fetch the config of an unknown hub id.", WHAT, "--download")] = False,
    tokens: Annotated[str | None, option("N", "Tokens of the whole run, padding included: 50M, 1e9.", WHAT)] = None,
    rows: Annotated[str | None, option("N", "Instead of tokens, sequences of the whole run.", WHAT)] = None,
    effective_batch_size: Annotated[
        str | None, option("N", f"Sequences per optimizer step. (default: {EFFECTIVE_BATCH_SIZE})", WHAT)
    ] = None,
    cloud: Annotated[str | None, option("NAME", "aws, azure or gcp. (default: all)", WHERE)] = None,
    region: Annotated[str | None, option("NAME", "Of which prices are known, or come with --catalog.", WHERE)] = None,
    node_type: Annotated[
        list[str] | None, option("ID", "Only this type, or those that begin so (p4d); may be repeated.", WHERE)
    ] = None,
    min_compute_capability: Annotated[
        str | None, option("N.N", "Of the GPUs: 8.0 is Ampere, the first with bf16.", WHERE)
    ] = None,
    max_nodes: Annotated[
        str | None, option("N", f"Nodes that train. (default: {Constraints().max_nodes})", WHERE)
    ] = None,
    spot: Annotated[bool, option("", "Spot machines, where their price is known.", WHERE, "--spot")] = False,
    tier: Annotated[str | None, option("NAME", "Of the workspace: premium or enterprise.", WHERE)] = None,
    catalog: Annotated[
        str | None, option("FILE", "Your own rows and prices over the catalogue's, as CSV or JSON.", WHERE)
    ] = None,
    workspace_node_types: Annotated[
        str | None, option("FILE", "The workspace's saved answer to list-node-types.", WHERE)
    ] = None,
    gpu: Annotated[
        str | None, option("NAME", "Instead of a search: the GPU of an existing cluster or Spark server.", GIVEN)
    ] = None,
    gpus_per_node: Annotated[str | None, option("N", "GPUs of one node.", GIVEN)] = None,
    nodes: Annotated[str | None, option("N", "Nodes that train. (default: 1)", GIVEN)] = None,
    ram_gib: Annotated[
        str | None, option("GIB", f"Of one node. (default: {RAM_BYTES_PER_GPU // 2**30} for each GPU)", GIVEN)
    ] = None,
    nvme_gib: Annotated[str | None, option("GIB", "Of one node, for offload. (default: none)", GIVEN)] = None,
    interconnect_gbps: Annotated[
        str | None, option("GBIT/S", f"Of one node to the others. (default: {INTERCONNECT_GBPS})", GIVEN)
    ] = None,
    usd_per_hour: Annotated[str | None, option("USD", "Of all nodes together.", GIVEN)] = None,
    objective: Annotated[str | None, option("NAME", "cost of the run, or time. (default: cost)", LIMITS)] = None,
    max_usd_per_hour: Annotated[str | None, option("USD", "Of the whole cluster.", LIMITS)] = None,
    budget_usd: Annotated[str | None, option("USD", "Of the whole run.", LIMITS)] = None,
    deadline_hours: Annotated[str | None, option("HOURS", "Until the run ends.", LIMITS)] = None,
    log_volume: Annotated[
        str | None, option("FOLDER", "Of a Volume (/Volumes/...), for the logs of driver and executors.", CLUSTER)
    ] = None,
    tags: Annotated[
        list[str] | None, option("NAME=VALUE", "Of the cluster, and so of its bill; may be repeated.", CLUSTER)
    ] = None,
    policy_id: Annotated[str | None, option("ID", "The cluster policy that it follows.", CLUSTER)] = None,
    instance_pool_id: Annotated[
        str | None, option("ID", "The pool that its nodes come from, which then decides their type.", CLUSTER)
    ] = None,
    driver_instance_pool_id: Annotated[
        str | None, option("ID", "The driver's pool. (default: the same)", CLUSTER)
    ] = None,
    single_user_name: Annotated[
        str | None, option("NAME", "Whose cluster it is: the identity that the run has.", CLUSTER)
    ] = None,
    script_folder: Annotated[
        str | None,
        option("FOLDER", f"Of init scripts, for NVMe offload. (default: {ClusterSettings().script_folder})", CLUSTER),
    ] = None,
    model_cache_volume: Annotated[
        str | None, option("FOLDER", "Of a Volume where models stay. (default: the nodes' drives)", CLUSTER)
    ] = None,
    spark_version: Annotated[
        str | None, option("KEY", "Of the runtime. (default: the newest with long-term support)", CLUSTER)
    ] = None,
    top: Annotated[str | None, option("N", "Rows of the table. (default: 10)", OUTPUT)] = None,
    show_all: Annotated[bool, option("", "Every refused type with its own reason.", OUTPUT, "--all")] = False,
    as_json: Annotated[bool, option("", "Print one JSON object.", OUTPUT, "--json")] = False,
    **options: Any,
) -> None:
    """Choose and price a GPU cluster for a fine-tune, with its DeepSpeed configuration.

    With --gpu it takes hardware that is there, and chooses the settings only.
    Exit status 1 where nothing fits, 2 for a request that cannot be used.
    """
    asked = {
        "model": model,
        "parameters": parameters,
        "tokens": tokens,
        "rows": rows,
        "effective_batch_size": effective_batch_size,
        "cloud": cloud,
        "region": region,
        "node_type": node_type or None,
        "min_compute_capability": min_compute_capability,
        "max_nodes": max_nodes,
        "spot": spot,
        "tier": tier,
        "catalog": catalog,
        "workspace_node_types": workspace_node_types,
        "gpu": gpu,
        "gpus_per_node": gpus_per_node,
        "nodes": nodes,
        "ram_gib": ram_gib,
        "nvme_gib": nvme_gib,
        "interconnect_gbps": interconnect_gbps,
        "usd_per_hour": usd_per_hour,
        "objective": objective,
        "max_usd_per_hour": max_usd_per_hour,
        "budget_usd": budget_usd,
        "deadline_hours": deadline_hours,
        "log_volume": log_volume,
        "tags": tags or None,
        "policy_id": policy_id,
        "instance_pool_id": instance_pool_id,
        "driver_instance_pool_id": driver_instance_pool_id,
        "single_user_name": single_user_name,
        "script_folder": script_folder,
        "model_cache_volume": model_cache_volume,
        "spark_version": spark_version,
        "top": top,
        **options,
    }
    source = ModelSource(fetch=hub_fetch() if download else None)
    console = None if as_json else Console(soft_wrap=False)
    try:
        if describes_hardware(asked):
            fits = _on_given({**asked, "all": show_all}, source, console)
        else:
            fits = _searched(asked, source, console, show_all=show_all)
    except SpecError as error:
        tell(error, {*asked, "all"}, as_json=as_json)
        raise typer.Exit(2) from None
    if not fits:
        raise typer.Exit(1)


def _searched(asked: Mapping[str, Any], source: ModelSource, console: Console | None, *, show_all: bool) -> bool:
    """Whether anything fits; JSON where there is no console."""
    found = planned(asked, source)
    if console is None:
        typer.echo(json.dumps(planned_as_json(found), allow_nan=False))
    else:
        print_plan(console, found, show_all=show_all)
    return found.plan.choice.best is not None


def _on_given(asked: Mapping[str, Any], source: ModelSource, console: Console | None) -> bool:
    """Likewise."""
    found = planned_on_given(asked, source)
    if console is None:
        typer.echo(json.dumps(planned_on_given_as_json(found), allow_nan=False))
    else:
        print_on_given(console, found)
    return found.plan.deepspeed_config is not None
