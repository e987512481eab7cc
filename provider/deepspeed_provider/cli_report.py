# SPDX-License-Identifier: Apache-2.0
"""An estimate for a person: tables with bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich import box
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deepspeed_provider.requested.estimate import Answer, OnHardware
from deepspeed_provider.sizing.estimate import Fit, GpuMemory, MemoryEstimate, Store
from deepspeed_provider.sizing.options import Method, Offload, TrainingOptions
from deepspeed_provider.sizing.parts import Part

GIB: Final = 2**30
BAR_WIDTH: Final = 24


def print_report(console: Console, found: Answer, *, explain: bool) -> None:
    """Tables of parameters, GPU, host and NVMe; with ``explain`` the formula of each part."""
    memory = found.estimate
    console.print(Text(found.model.name, style="bold"))
    console.print(Text(_training(found.options)))
    console.print(Text(_parameters(memory)))
    console.print(_gpu(memory.gpu))
    console.print(_host(memory.host))
    if memory.host.at_other_moments:
        console.print(Text(_at_other_moments(memory.host)))
    if memory.nvme.parts:
        console.print(_table("NVMe of one node", memory.nvme.parts, {"total": memory.nvme.total_bytes}))
    if found.on_hardware is not None:
        console.print(Text(_speed(found.on_hardware, memory.gpu), style="bold"))
    if explain:
        for title, parts in (
            ("GPU", memory.gpu.parts),
            ("Host", (*memory.host.parts, *memory.host.at_other_moments)),
            ("NVMe", memory.nvme.parts),
        ):
            _explain(console, title, parts)
    print_list(console, "Assumptions", memory.assumptions, "")
    print_list(console, "Warnings", found.warnings, "yellow")


def _training(options: TrainingOptions) -> str:
    targets = ",".join(options.lora_targets)
    adapters = "" if options.method is Method.FULL else f" of rank {options.lora_rank} on {targets}"
    offloaded = "" if options.offload is Offload.NONE else f", {options.offload} offloaded to {options.offload_device}"
    return (
        f"{options.method}{adapters}, {options.precision}, {options.optimizer},"
        f" ZeRO stage {options.zero_stage}{offloaded}, {options.nodes} x {options.gpus_per_node} GPU,"
        f" micro-batch {options.micro_batch_size} x {options.sequence_length:,} tokens"
    )


def _parameters(memory: MemoryEstimate) -> str:
    counts = memory.parameters
    share = counts.trainable / (counts.total + counts.adapters)
    text = f"Parameters: {counts.total:,}, trained {counts.trainable:,} ({share:.2%})"
    return text + (f", active per token {counts.active:,}" if counts.active != counts.total else "")


_FITS: Final = {
    Fit.YES: "fits",
    Fit.TIGHT: "fits tightly, if the allocator gives back what it caches",
    Fit.NO: "does not fit",
}


def _speed(found: OnHardware, memory: GpuMemory) -> str:
    """Two lines: whether it fits, and how fast it goes."""
    hardware, speed = found.hardware, found.throughput
    size = f"{_gib(memory.total_bytes)} of {_gib(hardware.gpu.memory_bytes)} GiB on each {hardware.gpu.name}"
    each = f", {speed.tokens_per_second_per_gpu:,.0f} on each GPU" if hardware.world_size > 1 else ""
    return (
        f"{size}: {_FITS[found.fit]}\n"
        f"{speed.tokens_per_second:,.0f} tokens/s{each}, {speed.mfu:.1%} of the peak (MFU), "
        f"{speed.seconds_per_step:,.2f} s a step, bound by {speed.bound_by}"
    )


def _gpu(memory: GpuMemory) -> Table:
    sums = {
        "allocated (tensors)": memory.allocated_bytes,
        "reserved (with fragmentation)": memory.reserved_bytes,
        "total (nvidia-smi)": memory.total_bytes,
    }
    return _table(f"Memory of the fullest GPU, at its peak: {memory.peak_at}", memory.parts, sums)


def _host(memory: Store) -> Table:
    title = f"Host memory of one node, at its peak: {memory.peak_at}"
    return _table(title, memory.parts, {"total": memory.total_bytes})


def _at_other_moments(memory: Store) -> str:
    """What needs less, and is not there at the peak."""
    listed = ", ".join(f"{part.name} {_gib(part.bytes)} GiB" for part in memory.at_other_moments)
    return f"Not at that moment, and not in the total: {listed}"


def _table(title: str, parts: Iterable[Part], sums: dict[str, int]) -> Table:
    total = max(sums.values())
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Part")
    table.add_column("GiB", justify="right")
    table.add_column("Share", justify="right")
    table.add_column("")
    for part in sorted(parts, key=lambda part: -part.bytes):
        bar = ProgressBar(total=max(total, 1), completed=part.bytes, width=BAR_WIDTH)
        table.add_row(Text(part.name), _gib(part.bytes), f"{part.bytes / max(total, 1):.1%}", bar)
    table.add_section()
    for name, size in sums.items():
        table.add_row(Text(name, style="bold"), Text(_gib(size), style="bold"), f"{size / max(total, 1):.1%}", "")
    return table


def _explain(console: Console, title: str, parts: Iterable[Part]) -> None:
    for part in sorted(parts, key=lambda part: -part.bytes):
        console.print(Text(f"{title}: {part.name} = {part.bytes:,} bytes", style="bold"))
        console.print(Text(f"  {part.explained()}"))
        console.print(Text(f"  Source: {part.source}", style="dim"))


def print_list(console: Console, title: str, lines: Iterable[str], style: str) -> None:
    """Lines under a title; nothing where there are none."""
    found = list(lines)
    if found:
        console.print(Text(f"\n{title}", style=f"bold {style}".strip()))
    for line in found:
        console.print(Text(f"- {line}", style=style))


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"
