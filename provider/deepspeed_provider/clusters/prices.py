# SPDX-License-Identifier: Apache-2.0
"""What a Databricks unit costs, and how packaged tables are read."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType

from deepspeed_provider.clusters.node_type import Cloud, Tier


def usd_per_dbu(cloud: Cloud, tier: Tier = Tier.PREMIUM) -> float:
    """List price of a DBU of a job's compute."""
    prices = _dbu_prices()
    return prices.get((cloud, tier), prices[cloud, Tier.PREMIUM])


def price_region(cloud: Cloud) -> str:
    """Of which the list prices are."""
    return _regions()[cloud]


@cache
def _regions() -> Mapping[Cloud, str]:
    return MappingProxyType({Cloud(row["cloud"]): row["region"] for row in packaged("dbu_prices.csv")})


def has_tier(cloud: Cloud, tier: Tier) -> bool:
    """Whether the list has a price for it."""
    return (cloud, tier) in _dbu_prices()


@cache
def _dbu_prices() -> Mapping[tuple[Cloud, Tier], float]:
    rows = packaged("dbu_prices.csv")
    return MappingProxyType({(Cloud(row["cloud"]), Tier(row["tier"])): float(row["usd_per_dbu"]) for row in rows})


def packaged(name: str) -> list[dict[str, str]]:
    """Rows of one of this room's tables."""
    text = resources.files("deepspeed_provider.clusters").joinpath(f"data/{name}").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
