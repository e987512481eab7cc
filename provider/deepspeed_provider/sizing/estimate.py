# SPDX-License-Identifier: Apache-2.0
"""The estimate: every part of GPU, host and NVMe memory by name, and their sums."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from deepspeed_provider.sizing import notes
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.gpu import gpu_parts
from deepspeed_provider.sizing.host import host_moments, nvme_parts
from deepspeed_provider.sizing.options import TrainingOptions
from deepspeed_provider.sizing.parts import Part
from deepspeed_provider.sizing.weights import Weights, weights

OUTSIDE_TENSORS = frozenset({"fragmentation", "cuda_context", "nccl"})
OUTSIDE_ALLOCATOR = frozenset({"cuda_context", "nccl"})


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Parameters by what becomes of them; adapters are not part of ``total``."""

    total: int
    trainable: int
    embedding: int
    layers: int
    experts: int
    active: int
    adapters: int


class Fit(StrEnum):
    """Whether a GPU is large enough."""

    YES = "yes"  # with what the allocator usually holds beyond its tensors
    TIGHT = "tight"  # the tensors fit; the allocator will have to give back what it caches
    NO = "no"


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Of the fullest GPU, at the moment that needs most (``peak_at``)."""

    parts: tuple[Part, ...]
    peak_at: str

    @property
    def total_bytes(self) -> int:
        """What nvidia-smi shows: with CUDA context and communication."""
        return sum(part.bytes for part in self.parts)

    @property
    def reserved_bytes(self) -> int:
        """What the caching allocator holds (``torch.cuda.max_memory_reserved``)."""
        return sum(part.bytes for part in self.parts if part.name not in OUTSIDE_ALLOCATOR)

    @property
    def allocated_bytes(self) -> int:
        """Tensors (``torch.cuda.max_memory_allocated``)."""
        return sum(part.bytes for part in self.parts if part.name not in OUTSIDE_TENSORS)

    @property
    def minimum_bytes(self) -> int:
        """Without fragmentation: below this no run can be. An allocator short of memory frees its unused blocks."""
        return sum(part.bytes for part in self.parts if part.name != "fragmentation")

    def fits(self, capacity_bytes: int) -> Fit:
        """Whether a GPU of this capacity is large enough."""
        if self.total_bytes <= capacity_bytes:
            return Fit.YES
        return Fit.TIGHT if self.minimum_bytes <= capacity_bytes else Fit.NO

    def part(self, name: str) -> int:
        """Bytes of a part; 0 where there is none."""
        return sum(part.bytes for part in self.parts if part.name == name)


@dataclass(frozen=True, kw_only=True)
class Store:
    """Host memory or NVMe of one node, at the moment that needs most (``peak_at``).

    ``at_other_moments`` are parts that are there only when less is needed; no total counts them.
    """

    parts: tuple[Part, ...]
    peak_at: str = "training"
    at_other_moments: tuple[Part, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What one way to train needs."""

    parameters: ParameterCounts
    gpu: GpuMemory
    host: Store
    nvme: Store
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]


def estimate(architecture: Architecture, options: TrainingOptions) -> MemoryEstimate:
    """Memory of the fullest GPU, and of one node's host and NVMe.

    Raises :class:`SpecError` for LoRA targets that the model does not have.
    """
    found = weights(architecture, options)
    parts, peak_at = gpu_parts(architecture, found, options)
    gpu = GpuMemory(parts=parts, peak_at=peak_at)
    return MemoryEstimate(
        parameters=_counts(architecture, found),
        gpu=gpu,
        host=_host(found, options),
        nvme=Store(parts=nvme_parts(found, options)),
        assumptions=notes.assumptions(found, options),
        warnings=notes.warnings(architecture, found, options, gpu_bytes=gpu.total_bytes),
    )


def _host(found: Weights, options: TrainingOptions) -> Store:
    moments = host_moments(found, options)
    peak_at = max(moments, key=lambda moment: sum(part.bytes for part in moments[moment]))
    parts = moments[peak_at]
    names = {part.name for part in parts}
    others = (part for moment in moments.values() for part in moment if part.name not in names)
    return Store(parts=parts, peak_at=peak_at, at_other_moments=tuple(others))


def _counts(architecture: Architecture, found: Weights) -> ParameterCounts:
    return ParameterCounts(
        total=architecture.parameters,
        trainable=found.trained,
        embedding=architecture.embedding_parameters + architecture.head_parameters,
        layers=architecture.layer_parameters,
        experts=architecture.expert_parameters,
        active=architecture.active_parameters,
        adapters=0 if found.adapters is None else found.trained,
    )
