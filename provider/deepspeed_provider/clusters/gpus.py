# SPDX-License-Identifier: Apache-2.0
"""GPUs as data: what the driver reports and what the maker's data sheet promises."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Final

from deepspeed_provider.errors import FieldProblem, SpecError

GIB: Final = 2**30
TERA: Final = 10**12
GIGA: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. FLOP/s are peaks without sparsity, bandwidths are per direction.

    Attributes:
        memory_bytes: what a process can have at most (``torch.cuda.get_device_properties().total_memory``):
            below the number in the name, and below nvidia-smi's, by what ECC and the driver keep.
        dense_flops_16bit: of the tensor cores, in bf16 or fp16 with fp32 sums.
        dense_flops_fp32: of the plain cores; torch uses TF32 only when asked to.
        memory_bytes_per_second: of the GPU's own memory.
        pcie_bytes_per_second: to the host, over a full-width slot.
        nvlink_bytes_per_second: to all other GPUs together; 0 without.
        matmul_share: of the 16-bit peak that a large product reaches: the peak is counted at a clock that the
            power limit does not allow for long. ``matmul_source`` says whether it was measured.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    bf16: bool
    dense_flops_16bit: float
    dense_flops_fp32: float
    memory_bytes_per_second: float
    pcie_bytes_per_second: float
    nvlink_bytes_per_second: float
    matmul_share: float
    matmul_source: str
    source: str
    date: str


def gpus() -> tuple[Gpu, ...]:
    """All GPUs of the catalogue, small ones first."""
    return tuple(found for found, _ in _table())


def gpu(name: str) -> Gpu:
    """The GPU of this name in any spelling: ``A100-40GB``, ``a100_80gb``, ``NVIDIA A10G``, ``T4``.

    Raises :class:`SpecError` with the nearest names for one that is unknown, or that could be several.
    """
    found = _by_key().get(_key(name))
    if found is None:
        raise SpecError([_unknown(name)])
    return found


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|tesla", "", name.lower())


@cache
def _table() -> tuple[tuple[Gpu, tuple[str, ...]], ...]:
    """Each GPU with its other names."""
    text = resources.files("deepspeed_provider.clusters").joinpath("data/gpus.csv").read_text(encoding="utf-8")
    return tuple((_gpu(row), tuple(row["aliases"].split("|"))) for row in csv.DictReader(text.splitlines()))


@cache
def _by_key() -> Mapping[str, Gpu]:
    return MappingProxyType({_key(name): found for found, names in _table() for name in (found.name, *names)})


def _gpu(row: Mapping[str, str]) -> Gpu:
    major, minor = row["compute_capability"].split(".")
    return Gpu(
        name=row["name"],
        memory_bytes=round(float(row["memory_gib"]) * GIB),
        compute_capability=(int(major), int(minor)),
        bf16=row["bf16"] == "yes",
        dense_flops_16bit=float(row["dense_tflops_16bit"]) * TERA,
        dense_flops_fp32=float(row["dense_tflops_fp32"]) * TERA,
        memory_bytes_per_second=float(row["memory_gb_per_second"]) * GIGA,
        pcie_bytes_per_second=float(row["pcie_gb_per_second"]) * GIGA,
        nvlink_bytes_per_second=float(row["nvlink_gb_per_second"]) * GIGA,
        matmul_share=float(row["matmul_share"]),
        matmul_source=row["matmul_source"],
        source=row["source"],
        date=row["date"],
    )


def _unknown(name: str) -> FieldProblem:
    key = _key(name)
    names = [found.name for found in gpus()]
    started = [known for known in names if key and _key(known).startswith(key)]
    near = started or [
        known.name
        for match in difflib.get_close_matches(key, list(_by_key()), n=3, cutoff=0.4)
        if (known := _by_key()[match])
    ]
    return FieldProblem(
        field="gpu",
        value=name,
        problem="could be any of several GPUs" if len(started) > 1 else "is not in the GPU catalogue",
        suggestion=f"Nearest: {', '.join(dict.fromkeys(near))}." if near else f"Known: {', '.join(names)}.",
    )
