# SPDX-License-Identifier: Apache-2.0
"""What waiting for many runs costs: our trigger beside the Databricks provider's own, on the same fake workspace.

Both wait in one process of their own, as in a triggerer, for the same runs with the same interval. Requests are counted
by the workspace; processor time is the waiting process's; an end is detected when the process says so. The interval
is a tenth of the provider's default, for both.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_provider.testing.workspace import FakeWorkspace

RUNS = (20, 200)
INTERVAL_S = 3
# With the most runs; below it chance alone makes one median later than the other.
TARGET = 10
NO_LATER_S = INTERVAL_S / 10
# Requests and processor time are those between these moments, while all runs are in flight; ends come after them.
SETTLED_S, IN_FLIGHT_S = 8.0, 38.0
SHORTEST_S, LONGEST_S = 42.0, 60.0
SEED = 20261130
CLUSTER = {"spark_version": "16.4.x-gpu-ml-scala2.12", "node_type_id": "g5.xlarge", "num_workers": 0}
TASK = {"task_key": "t", "new_cluster": CLUSTER, "spark_python_task": {"python_file": "/Workspace/x.py"}}
OURS, THEIRS = "ours", "the provider's"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one way and one number of runs: requests and processor time in flight, and how late each end was seen."""

    requests: int
    cpu_s: float
    delays_s: list[float]

    @property
    def requests_per_minute(self) -> float:
        return 60 * self.requests / (IN_FLIGHT_S - SETTLED_S)

    @property
    def delay_s(self) -> float:
        return statistics.median(self.delays_s)

    def cpu_per_run_ms(self, runs: int) -> float:
        """In a minute."""
        return 1000 * 60 * self.cpu_s / (IN_FLIGHT_S - SETTLED_S) / runs


def measure() -> None:
    """Prints requests, processor time and delay of both, their ratios, for few runs and many, and whether that is the
    target."""
    measured: dict[int, dict[str, Measured]] = {}
    for runs in RUNS:
        measured[runs] = found = {way: _measure(way, runs) for way in (THEIRS, OURS)}
        for way, each in found.items():
            print(
                f"{runs} runs, {way}: {each.requests_per_minute:.0f} requests a minute, "
                f"{each.cpu_per_run_ms(runs):.0f} ms of processor time a minute and run, ends detected after "
                f"{each.delay_s:.1f} s (median), {max(each.delays_s):.1f} s (longest)",
                flush=True,
            )
        ours, theirs = found[OURS], found[THEIRS]
        print(
            f"{runs} runs: {theirs.requests / ours.requests:.1f} times fewer requests, "
            f"{theirs.cpu_s / ours.cpu_s:.1f} times less processor time, detection "
            f"{ours.delay_s - theirs.delay_s:+.1f} s",
            flush=True,
        )
    print(verdict(measured), flush=True)


def verdict(measured: Mapping[int, Mapping[str, Measured]]) -> str:
    """How both grow from the fewest runs to the most, and whether the most meet the target."""
    few, many = min(measured), max(measured)
    ours, theirs = measured[many][OURS], measured[many][THEIRS]
    fewer, later_s = theirs.requests / ours.requests, ours.delay_s - theirs.delay_s
    met = fewer >= TARGET and later_s <= NO_LATER_S
    growth = {way: each.requests / measured[few][way].requests for way, each in measured[many].items()}
    return (
        f"from {few} runs to {many} requests grow {growth[OURS]:.1f} times with ours and {growth[THEIRS]:.1f} times "
        f"with {THEIRS}. With {many} they are {fewer:.1f} times fewer, detection {later_s:+.1f} s; the target is "
        f"{TARGET} times fewer and no later (within {NO_LATER_S:.1f} s): {'met' if met else 'MISSED'}"
    )


def _measure(way: str, runs: int) -> Measured:
    with FakeWorkspace(speed=1.0) as workspace:
        told, tell = os.pipe()
        words = [sys.executable, "-m", "benches.poller", way, str(tell)]
        waiting = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            # What triggers log is not measured, but written by both.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "AIRFLOW_CONN_DATABRICKS_DEFAULT": workspace.connection_json},
            pass_fds=[tell],
            text=True,
        )
        os.close(tell)
        assert waiting.stdin is not None
        with os.fdopen(told) as lines:
            assert json.loads(next(lines)) == {"ready": True}
            ends_ms = _submit(workspace, runs)
            print(json.dumps(sorted(ends_ms)), file=waiting.stdin, flush=True)
            delays_s, counts, spent_s = [], [], []
            for line in lines:
                said = json.loads(line)
                if "run_id" in said:
                    delays_s.append((workspace.clock.now_ms - ends_ms[said["run_id"]]) / 1000)
                else:
                    counts.append(len(workspace.requests))
                    spent_s.append(said["cpu_s"])
        assert waiting.wait() == 0
        assert len(delays_s) == runs, "every end was detected"
        return Measured(requests=counts[1] - counts[0], cpu_s=spent_s[1] - spent_s[0], delays_s=delays_s)


def _submit(workspace: FakeWorkspace, runs: int) -> dict[int, int]:
    """When each run will have ended, by its id."""
    chance = random.Random(SEED)
    for _ in range(runs):
        workspace.next_run(start_s=0.0, run_s=chance.uniform(SHORTEST_S, LONGEST_S), stop_s=0.0)
        workspace.jobs.submit({"tasks": [TASK]})
    now_ms = workspace.clock.now_ms
    return {run.run_id: run.course(now_ms).tasks[0].attempts[0].gone_ms for run in workspace.runs}


def _trigger(way: str, run_id: int) -> Any:
    if way == THEIRS:
        from airflow.providers.databricks.triggers.databricks import DatabricksExecutionTrigger

        return DatabricksExecutionTrigger(run_id, "databricks_default", polling_period_seconds=INTERVAL_S)
    from deepspeed_provider.backends.base import RunHandle
    from deepspeed_provider.triggers.run import DurableRunTrigger

    handle = RunHandle(
        backend="databricks_jobs",
        token=f"{run_id:040d}",
        generation=1,
        output_uri=f"/Volumes/main/default/runs/{run_id}",
        world_size=1,
        ids={"run_id": str(run_id)},
    )
    return DurableRunTrigger(
        handle=handle.to_json(),
        spark_connect_conn_id="",
        databricks_conn_id="databricks_default",
        task={"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": -1},
        poll_interval_s=INTERVAL_S,
    )


async def _wait(way: str, run_ids: list[int], tell: int) -> None:
    async def one(run_id: int) -> None:
        async for _ in _trigger(way, run_id).run():
            _say(tell, run_id=run_id)
            return

    async def look_at_the_clock() -> None:
        for pause_s in (SETTLED_S, IN_FLIGHT_S - SETTLED_S):
            await asyncio.sleep(pause_s)
            used = resource.getrusage(resource.RUSAGE_SELF)
            _say(tell, cpu_s=used.ru_utime + used.ru_stime)

    await asyncio.gather(look_at_the_clock(), *map(one, run_ids))


def _say(tell: int, **said: object) -> None:
    os.write(tell, (json.dumps(said) + "\n").encode())


def _main(way: str, tell: int) -> None:
    # Imports are the same for both, and not what is measured.
    _trigger(way, 0)
    _say(tell, ready=True)
    asyncio.run(_wait(way, json.loads(sys.stdin.readline()), tell))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
