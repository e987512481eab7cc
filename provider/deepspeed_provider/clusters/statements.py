# SPDX-License-Identifier: Apache-2.0
"""What a table of candidates rests on, in words: assumptions behind every row, doubts about some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from deepspeed_provider.clusters.candidate import POOR_NETWORK_FACTOR, STARTUP_HOURS, Candidate, Setup
from deepspeed_provider.clusters.gpus import GIGA
from deepspeed_provider.clusters.job import Constraints, Headroom, Job
from deepspeed_provider.clusters.node_type import OWN_PRICE, Cloud, NodeType, PriceDoubt, Support, Tier
from deepspeed_provider.clusters.prices import has_tier, price_region
from deepspeed_provider.clusters.settings import steps_on_cpu
from deepspeed_provider.sizing.options import Method, Offload, Optimizer

# 1600 Gbit/s, the slowest of the published runs on several nodes.
MEASURED_INTER_NODE_BYTES_PER_SECOND: Final = 200 * GIGA


def assumptions(job: Job, found: Sequence[Candidate], constraints: Constraints) -> tuple[str, ...]:
    """Of the rows shown."""
    stated = [
        f"{steps_text(job)} of {job.effective_batch_size} sequences of {job.options.sequence_length:,} "
        f"tokens, padding included; evaluation and checkpoints take no time.",
        f"A cluster needs {60 * STARTUP_HOURS:g} minutes until it trains; they are billed.",
        headroom_left(constraints.headroom),
    ]
    if any(one.drivers for one in found):
        stated.append("A cluster of several workers has a driver of their type, which is billed and does not train.")
        if constraints.spot:
            stated.append("The driver of a spot cluster runs on demand, and is priced so.")
    if any(one.nodes > 1 and one.node_type.poor_network for one in found):
        stated.append(f"Where the network is poor, several nodes are taken to be {POOR_NETWORK_FACTOR:g} times slower.")
    if not steps_on_cpu(job.options.optimizer):
        stated.append(f"The states of {job.options.optimizer} stay on the GPUs: DeepSpeed steps only Adam on the CPU.")
    return (*stated, *_prices(found, spot=constraints.spot))


def steps_text(job: Job) -> str:
    """How many."""
    return f"{job.steps:,} optimizer step{'' if job.steps == 1 else 's'}"


def headroom_left(headroom: Headroom) -> str:
    """Which share of each resource a plan leaves free."""
    return (
        f"Left free: {headroom.gpu:.0%} of GPU memory, {headroom.host:.0%} of host memory, {headroom.nvme:.0%} of NVMe."
    )


def warnings(found: Sequence[Candidate]) -> tuple[str, ...]:
    """Of the rows shown: assumed numbers, and networks that Databricks advises against."""
    kinds = _distinct(one.node_type for one in found)
    several = _distinct(one.node_type for one in found if one.nodes > 1)
    regions: dict[Cloud, set[str]] = {}
    for kind in kinds:
        regions.setdefault(kind.cloud, set()).add(kind.region)
    doubts = {
        "training over several nodes with their network is advised against by Databricks": [
            kind for kind in several if kind.poor_network
        ],
        "their network's bandwidth is assumed": [kind for kind in several if "network not sourced" in kind.notes],
        "their RAM is assumed": [kind for kind in kinds if "ram not sourced" in kind.notes],
        "known to Databricks only from its DBU table": [kind for kind in kinds if kind.support is Support.DBU_ONLY],
        **{
            f"your own row has no usd_per_dbu, so a DBU costs what it does on the list for {price_region(cloud)}": [
                kind for kind in kinds if kind.cloud is cloud and PriceDoubt.LISTED_DBU in kind.price_doubts
            ]
            for cloud in dict.fromkeys(kind.cloud for kind in kinds)
        },
        "your row names another region but no price of the machine, which stays the one that the catalogue has": [
            kind for kind in kinds if PriceDoubt.OTHER_REGION in kind.price_doubts
        ],
        "compared by prices of several regions; limit the plan to yours (region)": [
            kind for kind in kinds if len(regions[kind.cloud]) > 1
        ],
        "how much of its peak the GPU reaches is assumed, not measured": [
            kind for kind in kinds if kind.gpu.matmul_source.startswith("assumed")
        ],
    }
    return tuple(f"{_names(about)}: {doubt}." for doubt, about in doubts.items() if about)


def training_warnings(found: Setup) -> list[str]:
    """Of one way to train, wherever that is."""
    stated = [f"{doubt}: time and price of this plan may be far off." for doubt in _doubtful_speeds(found)]
    options = found.options
    if options.optimizer is not Optimizer.ADAMW:
        stated.append(
            f"The training of this package steps with AdamW, never {options.optimizer}: this plan is for a "
            "training of your own."
        )
    return stated


def _doubtful_speeds(found: Setup) -> Iterator[str]:
    """What the throughput model was not measured with, or failed on (docs/throughput.md)."""
    options, hardware = found.options, found.hardware
    if options.offload is not Offload.NONE:
        yield (
            "How fast offloaded states move and step (PCIe, the CPU's Adam, NVMe drives) follows published rates, and "
            "was not measured"
        )
    if options.method is Method.QLORA:
        yield "How fast bitsandbytes unpacks 4-bit weights was not measured, and other kernels' runs were slower"
    if hardware.nodes > 1 and options.method is not Method.FULL:
        yield "Published runs of adapters on two nodes took nearly twice as long as the model says"
    elif hardware.nodes > 1 and hardware.inter_node_bytes_per_second < MEASURED_INTER_NODE_BYTES_PER_SECOND:
        gbps = hardware.inter_node_bytes_per_second * 8 / GIGA
        yield f"Several nodes with {gbps:,.0f} Gbit/s between them were not measured"


def _prices(found: Sequence[Candidate], *, spot: bool) -> tuple[str, ...]:
    """One sentence for each cloud's list."""
    kind = "Spot" if spot else "On-demand"
    lists = {(one.node_type.cloud.value, one.node_type.region, one.node_type.price_date) for one in found}
    return tuple(
        f"{kind} prices of {cloud} in {region or 'an unnamed region'}, {_as_of(date)}, with Databricks' units."
        for cloud, region, date in sorted(lists)
    )


def _as_of(date: str) -> str:
    return f"{OWN_PRICE} without a date" if date == OWN_PRICE else f"as of {date or 'an unknown date'}"


def tier_assumptions(tier: Tier) -> tuple[str, ...]:
    """By which list Databricks' units are priced."""
    return (f"Databricks' units are billed by list prices of the {tier} tier, where your own rows give no other.",)


def tier_warnings(found: Sequence[Candidate], tier: Tier) -> tuple[str, ...]:
    """Clouds that have no such tier."""
    clouds = dict.fromkeys(one.node_type.cloud for one in found)
    return tuple(
        f"The {tier} tier has no list price on {cloud}: its units are priced by the {Tier.PREMIUM} tier's."
        for cloud in clouds
        if not has_tier(cloud, tier)
    )


def _distinct(kinds: Iterable[NodeType]) -> list[NodeType]:
    return list(dict.fromkeys(kinds))


def _names(kinds: Iterable[NodeType]) -> str:
    return ", ".join(dict.fromkeys(kind.node_type_id for kind in kinds))
