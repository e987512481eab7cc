# SPDX-License-Identifier: Apache-2.0
"""The machines that one training runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deepspeed_provider.clusters.gpus import GIB, GIGA, Gpu
from deepspeed_provider.clusters.node_type import NodeType

# What a node is taken to have where nobody says; the middle of the catalogue has 100 Gbit/s, 16 cores and 111 GiB.
INTERCONNECT_GBPS: Final = 100
CORES_PER_GPU: Final = 12
RAM_BYTES_PER_GPU: Final = 96 * GIB


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """So many equal nodes.

    Attributes:
        intra_node_bytes_per_second: of one GPU, per direction, to the GPUs beside it.
        inter_node_bytes_per_second: of one node, per direction, to other nodes.
    """

    gpu: Gpu
    gpus_per_node: int
    nodes: int
    intra_node_bytes_per_second: float
    inter_node_bytes_per_second: float
    ram_bytes_per_node: int
    nvme_bytes_per_node: int
    cores_per_node: int

    @classmethod
    def of(cls, node_type: NodeType, nodes: int) -> Hardware:
        """So many nodes of a type."""
        return cls(
            gpu=node_type.gpu,
            gpus_per_node=node_type.gpus,
            nodes=nodes,
            intra_node_bytes_per_second=node_type.intra_node_bytes_per_second,
            inter_node_bytes_per_second=node_type.network_bytes_per_second,
            ram_bytes_per_node=node_type.ram_bytes,
            nvme_bytes_per_node=node_type.nvme_bytes,
            cores_per_node=node_type.cores,
        )

    @classmethod
    def given(
        cls,
        *,
        gpu: Gpu,
        gpus_per_node: int,
        nodes: int = 1,
        interconnect_gbps: float | None = None,
        ram_bytes_per_node: int | None = None,
        nvme_bytes_per_node: int = 0,
        cores_per_node: int | None = None,
    ) -> Hardware:
        """Machines that a person describes. What is left out is taken as clouds have it: NVLink or PCIe between
        the GPUs of a node, ``interconnect_gbps`` (Gbit/s of one node to the others) as ``INTERCONNECT_GBPS``,
        ``CORES_PER_GPU`` and ``RAM_BYTES_PER_GPU``."""
        return cls(
            gpu=gpu,
            gpus_per_node=gpus_per_node,
            nodes=nodes,
            intra_node_bytes_per_second=gpu.nvlink_bytes_per_second or gpu.pcie_bytes_per_second,
            inter_node_bytes_per_second=(INTERCONNECT_GBPS if interconnect_gbps is None else interconnect_gbps)
            * GIGA
            / 8,
            ram_bytes_per_node=gpus_per_node * RAM_BYTES_PER_GPU if ram_bytes_per_node is None else ram_bytes_per_node,
            nvme_bytes_per_node=nvme_bytes_per_node,
            cores_per_node=gpus_per_node * CORES_PER_GPU if cores_per_node is None else cores_per_node,
        )

    @property
    def world_size(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def pcie_bytes_per_second(self) -> float:
        """Of one GPU to its host. Where GPUs meet over PCIe, that is the width which the node gives them."""
        gpu = self.gpu
        return (
            gpu.pcie_bytes_per_second
            if gpu.nvlink_bytes_per_second
            else min(gpu.pcie_bytes_per_second, self.intra_node_bytes_per_second)
        )
