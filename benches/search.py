# SPDX-License-Identifier: Apache-2.0
"""How long the search over the whole packaged catalogue takes, and what its plans cost beside naive choices."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_provider.clusters.candidate import STARTUP_HOURS, Candidate, Room, candidate, need
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.clusters.job import Constraints, Headroom, Job
from deepspeed_provider.clusters.node_types import Cloud, NodeType, node_types
from deepspeed_provider.clusters.search import search
from deepspeed_provider.clusters.settings import Layout, layouts, micro_batch_sizes
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import Offload, OffloadDevice, parse_options

from benches.throughput import Run, left_out_errors, percentile_90, runs

TARGET = 30
ROUNDS = 7
TIMED = (
    ("HuggingFaceTB/SmolLM2-135M", "full", 64, 2048),
    ("meta-llama/Llama-3.1-8B", "full", 64, 2048),
    ("meta-llama/Llama-3.1-8B", "lora", 32, 4096),
    ("mistralai/Mixtral-8x7B-v0.1", "qlora", 32, 2048),
    ("meta-llama/Llama-3.1-70B", "full", 128, 4096),
)
# Two at a time of each: models and methods, then sequence lengths and batches.
PRICED = (
    ("HuggingFaceTB/SmolLM2-135M", "full"),
    ("Qwen/Qwen2.5-0.5B", "full"),
    ("google/gemma-2-2b", "full"),
    ("meta-llama/Llama-2-7b-hf", "full"),
    ("meta-llama/Llama-2-7b-hf", "lora"),
    ("meta-llama/Llama-2-13b-hf", "full"),
    ("meta-llama/Llama-2-13b-hf", "qlora"),
    ("codellama/CodeLlama-34b-hf", "qlora"),
    ("meta-llama/Llama-2-70b-hf", "lora"),
    ("meta-llama/Llama-2-70b-hf", "qlora"),
)
PUBLISHED = 10
TOKENS = 50_000_000
IMPORT = "import time; start = time.perf_counter(); import airflow.sdk; print(time.perf_counter() - start)"
OURS = "from benches.search import print_times; print_times()"


def measure() -> None:
    """Prints both parts."""
    _speed()
    _prices()


def job(model: str, method: str, batch: int, sequence_length: int, tokens: int = TOKENS) -> Job:
    """A fine-tune of a model of the catalogue."""
    return Job(
        architecture=architecture(model_config(model)),
        options=parse_options({"method": method, "sequence_length": sequence_length}),
        tokens=tokens,
        effective_batch_size=batch,
    )


# how long it takes


def print_times() -> None:
    """Seconds of reading the catalogue, and of the first and second search for each job with and without every reason
    read, as JSON."""
    start = time.perf_counter()
    kinds = node_types()
    reading, found = time.perf_counter() - start, []
    for asked in TIMED:
        sought = job(*asked)
        found.append([seconds for _ in range(2) for seconds in _timed(sought, kinds)])
    print(json.dumps({"reading": reading, "searches": found}))


def _timed(sought: Job, kinds: Sequence[NodeType]) -> tuple[float, float]:
    """Until the table is there, and until all reasons are."""
    start = time.perf_counter()
    found = search(sought, kinds)
    table = time.perf_counter() - start
    assert found.rejections
    return table, time.perf_counter() - start


def _speed() -> None:
    imports, readings, searches = [], [], []
    for _ in range(ROUNDS):
        imports.append(float(_printed(IMPORT)))
        ours = json.loads(_printed(OURS))
        readings.append(ours["reading"])
        searches.append(ours["searches"])
    print(
        f"importing airflow.sdk: {statistics.median(imports):.3f} s. Medians of {ROUNDS} rounds: an import in a new "
        "process, then all searches in another; ratios are those within a round. Not in them: importing our modules, "
        f"and reading the catalogue once ({1000 * statistics.median(readings):.0f} ms). A search finds the table; why "
        "each other type is not in it is counted when that is read, as the command line does: then it takes the times "
        "with all reasons."
    )
    ratios: list[float] = []
    whole_ratios: list[float] = []
    for number, (model, method, batch, length) in enumerate(TIMED):
        said = []
        for which, name in enumerate(("nothing known yet", "with all reasons", "again", "with all reasons")):
            seconds = [one[number][which] for one in searches]
            ratio = statistics.median(whole / own for whole, own in zip(imports, seconds, strict=True))
            (whole_ratios if which % 2 else ratios).append(ratio)
            said.append(f"{name} {1000 * statistics.median(seconds):.0f} ms (1/{ratio:.0f})")
        print(f"{model}, {method}, {batch} x {length:,}: {', '.join(said)}")
    print(
        f"a search of all {len(node_types())} node types takes 1/{statistics.median(ratios):.0f} of the import in the "
        f"middle and at most 1/{min(ratios):.0f}; the target is 1/{TARGET}. With the reasons of all types not shown it "
        f"takes 1/{statistics.median(whole_ratios):.0f} in the middle and at most 1/{min(whole_ratios):.0f}"
    )


def _printed(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


# what it saves


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Prices of one job; None where a choice is not possible: too large, or QLoRA under ZeRO 3.

    Attributes:
        published: the throughput of the advice was measured; ``advice_by_model`` then has the model's price of the
            same settings, which is what ``ours``, a price of the model too, can be compared with.
    """

    name: str
    published: bool
    ours: float
    advice: float | None
    advice_by_model: float | None
    cheapest: float | None


def comparisons() -> list[Comparison]:
    """30 jobs on AWS: 10 with a published run of the advice, 20 that are priced by the model alone."""
    kinds = [kind for kind in node_types() if kind.cloud is Cloud.AWS]
    found = [_published(run, kinds) for run in _published_runs()]
    for number, (model, method) in enumerate(PRICED):
        for batch, length in ((16, 2048), (64, 1024)) if number % 2 else ((32, 4096), (128, 512)):
            sought = job(model, method, batch, length)
            name = f"{model}, {method}, {batch} x {length:,}"
            advised = advice(sought, kinds)
            usd = None if advised is None else advised.usd
            found.append(_compared(name, sought, kinds, usd, usd, published=False))
    return found


def advice(sought: Job, kinds: Sequence[NodeType]) -> Candidate | None:
    """ZeRO 3 in bf16 on p4d.24xlarge with checkpointing, offload when it fails, the largest batch that fits."""
    kind = next(kind for kind in kinds if kind.node_type_id == "p4d.24xlarge")
    for offload in (Offload.NONE, Offload.OPTIMIZER, Offload.ALL):
        layout = Layout(zero_stage=3, offload=offload, offload_device=OffloadDevice.CPU, gradient_checkpointing=True)
        found = _largest(sought, kind, 1, layout)
        if found is not None:
            return found
    return None


def cheapest_per_hour(sought: Job, kinds: Sequence[NodeType]) -> Candidate | None:
    """The node type and number of nodes with the lowest price per hour that fits, with its best settings."""
    tried = [
        (cost, kind, nodes)
        for kind in kinds
        if kind.launchable and kind.priced()
        for nodes in range(1, 5)
        for cost in ((nodes + (nodes > 1)) * kind.usd_per_hour(),)
    ]
    for _, kind, nodes in sorted(tried, key=lambda one: (one[0], one[1].node_type_id)):
        found = search(sought, [kind], Constraints(min_nodes=nodes, max_nodes=nodes), top=1).best
        if found is not None:
            return found
    return None


def _largest(sought: Job, kind: NodeType, nodes: int, layout: Layout) -> Candidate | None:
    ranks = nodes * kind.gpus
    options = sought.options
    possible = layouts(options.method, alone=False, has_nvme=True, optimizer=options.optimizer)
    if sought.effective_batch_size % ranks or layout not in possible:
        return None
    room = Room.of(Hardware.of(kind, nodes), Headroom())
    for size in reversed(micro_batch_sizes(sought.effective_batch_size // ranks)):
        found = candidate(sought, kind, nodes, layout, size, spot=False)
        if not need(sought, found.options).shortfalls(room):
            return found
    return None


def _published_runs() -> list[Run]:
    """Of eight A100-40GB, as p4d.24xlarge has them, one of each model and length."""
    rows = {
        (run.name, run.options.sequence_length): run
        for run in runs()
        if run.gpu == "A100-40GB" and run.options.world_size == 8 and run.options.zero_stage == 3
    }
    chosen = sorted(rows.items(), key=lambda item: (item[0][1], item[0][0]))
    return [run for _, run in chosen[:: max(1, len(chosen) // PUBLISHED)]][:PUBLISHED]


def _published(run: Run, kinds: Sequence[NodeType]) -> Comparison:
    options = run.options
    batch = options.micro_batch_size * options.gradient_accumulation_steps * options.world_size
    sought = Job(
        architecture=run.architecture,
        options=options,
        tokens=TOKENS,
        effective_batch_size=batch,
    )
    kind = next(kind for kind in kinds if kind.node_type_id == "p4d.24xlarge")
    tokens = sought.steps * batch * options.sequence_length
    modelled = run.measured * (1 + run.error())
    advised, by_model = (
        kind.usd_per_hour() * (STARTUP_HOURS + tokens / (per_gpu * options.world_size) / 3600)
        for per_gpu in (run.measured, modelled)
    )
    name = f"MPT {run.name}, full, {batch} x {options.sequence_length:,}"
    return _compared(name, sought, kinds, advised, by_model, published=True)


def _compared(
    name: str,
    sought: Job,
    kinds: Sequence[NodeType],
    advised: float | None,
    by_model: float | None,
    *,
    published: bool,
) -> Comparison:
    ours = search(sought, kinds, top=1).best
    assert ours is not None, name
    cheap = cheapest_per_hour(sought, kinds)
    return Comparison(
        name=name,
        published=published,
        ours=ours.usd,
        advice=advised,
        advice_by_model=by_model,
        cheapest=None if cheap is None else cheap.usd,
    )


def _prices() -> None:
    found, error = comparisons(), model_error()
    print(
        f"price of {len(found)} runs of {TOKENS:,} tokens on AWS, on demand: naive choice / our plan. Our price is the "
        f"model's, whose 90th percentile error on GPUs that it has not seen is {error:.1%}: a ratio nearer to 1 than "
        "that is no difference."
    )
    for one in found:
        label = "advice from a published run" if one.published else "model-only"
        by_model = f" (by the model {_ratio(one.advice_by_model, one.ours, error)})" if one.published else ""
        print(
            f"  {one.name}: ours ${one.ours:,.2f}, advice {_ratio(one.advice, one.ours, error)}{by_model}, "
            f"cheapest hour {_ratio(one.cheapest, one.ours, error)} ({label})"
        )
    published = [one for one in found if one.published]
    modelled = [one for one in found if not one.published]
    advice = "ZeRO 3 on p4d, offload when it fails"
    _summary(f"{advice} (published runs, as measured)", [(one.advice, one.ours) for one in published], error)
    _summary(f"{advice} (published runs, by the model)", [(one.advice_by_model, one.ours) for one in published], error)
    _summary(f"{advice} (model-only)", [(one.advice, one.ours) for one in modelled], error)
    _summary("the cheapest hour that fits (model-only)", [(one.cheapest, one.ours) for one in found], error)


def model_error() -> float:
    """Share of the throughput; each row by constants that were fitted without its GPU."""
    return percentile_90(error for errors in left_out_errors().values() for error in errors) / 100


def _ratio(price: float | None, ours: float, error: float) -> str:
    if price is None:
        return "not possible"
    return f"{price / ours:.2f}{' (no difference)' if _alike(price / ours, error) else ''}"


def _alike(ratio: float, error: float) -> bool:
    """Whether the model cannot tell which is cheaper."""
    return abs(ratio - 1) <= error


def _summary(name: str, pairs: Sequence[tuple[float | None, float]], error: float) -> None:
    ratios = [price / ours for price, ours in pairs if price is not None]
    alike = sum(_alike(ratio, error) for ratio in ratios)
    better = sum(ratio > 1 and not _alike(ratio, error) for ratio in ratios)
    missing = len(pairs) - len(ratios)
    print(
        f"{name}: median {statistics.median(ratios):.2f} times our price, lowest {min(ratios):.2f}, "
        f"highest {max(ratios):.2f}; of {len(ratios)} ours is cheaper in {better}, no different in {alike}, dearer in "
        f"{len(ratios) - better - alike}"
        + (f"; {missing} are not possible (too large, or QLoRA with ZeRO 3)" if missing else "")
    )
