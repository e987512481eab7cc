# SPDX-License-Identifier: Apache-2.0
"""A kind of machine with GPUs: what it holds, what it costs, whether it can be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from deepspeed_provider.clusters.gpus import Gpu

# Azure sells parts of an A10 under names like those of whole ones; some lists count each as one GPU.
FRACTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "standard_nv6ads_a10_v5": "a sixth of an A10, with 4 GB",
        "standard_nv12ads_a10_v5": "a third of an A10, with 8 GB",
        "standard_nv18ads_a10_v5": "half of an A10, with 12 GB",
    }
)


# In place of a date, for a user's own price that has none.
OWN_PRICE: Final = "your own price"


class Cloud(StrEnum):
    """Where the machines stand."""

    AWS = "aws"
    AZURE = "azure"
    GCP = "gcp"


class Tier(StrEnum):
    """A workspace's plan, on which the price of a DBU depends. Azure has no Enterprise: there it is Premium."""

    PREMIUM = "premium"
    ENTERPRISE = "enterprise"


class Support(StrEnum):
    """What is known of Databricks launching a node type."""

    SUPPORTED = "supported"  # on its page of GPU types
    DBU_ONLY = "dbu-only"  # only a DBU rate was found
    RETIRED = "retired"  # can no longer be launched
    NO_EVIDENCE = "no-evidence"  # the cloud has it, Databricks does not name it


class PriceDoubt(StrEnum):
    """What a user's own row leaves to the packaged prices, which may not be right for it."""

    LISTED_DBU = "listed-dbu"  # the price of a DBU
    OTHER_REGION = "other-region"  # that of the machine, though the row moves it to another region


@dataclass(frozen=True, kw_only=True)
class NodeType:
    """One kind of machine in one region.

    Attributes:
        aliases: other spellings of the id that some lists have.
        nvme_bytes: of local drives known to be NVMe; 0 where none is known.
        network_bytes_per_second: of the node, to other nodes.
        intra_node_bytes_per_second: of one GPU, per direction, to the GPUs beside it.
        poor_network: Databricks advises against training over several such nodes.
        dbu_per_hour, on_demand_usd_per_hour, spot_usd_per_hour: None where it was not found, or is not sold.
        usd_per_dbu: of a job's compute.
        most_machines: of it at once, a driver included, by the quota of the workspace; None where nothing limits them.
        price_date: of the machine's price; :data:`OWN_PRICE` for a user's own without a date.
    """

    cloud: Cloud
    node_type_id: str
    aliases: tuple[str, ...] = ()
    gpu: Gpu
    gpus: int
    cores: int
    ram_bytes: int
    nvme_bytes: int
    network_bytes_per_second: float
    intra_node_bytes_per_second: float
    poor_network: bool
    dbu_per_hour: float | None
    usd_per_dbu: float
    on_demand_usd_per_hour: float | None
    spot_usd_per_hour: float | None
    region: str
    price_date: str
    source: str
    support: Support
    notes: str
    price_doubts: frozenset[PriceDoubt] = frozenset()
    most_machines: int | None = None

    @property
    def launchable(self) -> bool:
        """Whether a plan may choose it."""
        return self.support in (Support.SUPPORTED, Support.DBU_ONLY)

    def priced(self, *, spot: bool = False) -> bool:
        """Whether it is sold so, at a price that is known."""
        return self.dbu_per_hour is not None and self._vm_usd_per_hour(spot) is not None

    def usd_per_hour(self, *, spot: bool = False) -> float:
        """Of one node: the machine, and Databricks' units for it. Raises ValueError where it is not priced so."""
        machine = self._vm_usd_per_hour(spot)
        if machine is None or self.dbu_per_hour is None:
            raise ValueError(f"{self.node_type_id} has no known {'spot' if spot else 'on-demand'} price")
        return machine + self.dbu_per_hour * self.usd_per_dbu

    def most_nodes(self, most: int) -> int:
        """Nodes that may train, at most ``most``: a cluster of several takes one machine more, for its driver."""
        if self.most_machines is None:
            return most
        return min(most, max(1, self.most_machines - 1))

    def named(self, node_type_id: str) -> bool:
        """Whether this id means it; clouds' lists differ in case."""
        return node_type_id.casefold() in {name.casefold() for name in (self.node_type_id, *self.aliases)}

    def _vm_usd_per_hour(self, spot: bool) -> float | None:
        return self.spot_usd_per_hour if spot else self.on_demand_usd_per_hour
