# SPDX-License-Identifier: Apache-2.0
"""The machines that one training runs on."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_provider.clusters.gpus import Gpu
from deepspeed_provider.clusters.node_type import NodeType


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
