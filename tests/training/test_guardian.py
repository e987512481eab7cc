# SPDX-License-Identifier: Apache-2.0
"""A real three-level tree, worker -> agent -> ranks, as the distributor leaves it; its top is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from deepspeed_provider.training import guardian

from training import tiny_runs

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

# The ranks ignore polite signals and never end by themselves, like a rank stuck in a collective.
RANK = """
import os, pathlib, signal, sys, time
from deepspeed_provider.training import guardian
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 2:
    time.sleep(float(sys.argv[2]))
guardian.start(os.environ)
pathlib.Path(sys.argv[1], f"rank-{os.getpid()}").write_text("")
while True:
    time.sleep(60)
"""
AGENT = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder, *delay = sys.argv[2:]
pathlib.Path(folder, f"agent-{os.getpid()}").write_text("")
ranks = [subprocess.Popen([sys.executable, folder + "/rank.py", folder, *delay], start_new_session=True) for _ in "01"]
time.sleep(600)
"""
WORKER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, sys.argv[1] + "/agent.py", "torch.distributed.run", *sys.argv[1:]])
time.sleep(600)
"""
LIMIT_SECONDS = 3.0


@dataclass
class Tree:
    folder: Path
    worker: subprocess.Popen

    def pids(self, kind: str) -> list[int]:
        return [int(path.name.partition("-")[2]) for path in self.folder.glob(f"{kind}-*")]


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if guardian.describe(pid) is not None]


@pytest.fixture
def grow(tmp_path: Path) -> Iterator:
    trees: list[Tree] = []
    for name, text in (("rank", RANK), ("agent", AGENT), ("worker", WORKER)):
        (tmp_path / f"{name}.py").write_text(text)

    def make(*delay: str, **marks: str) -> Tree:
        environment = {**os.environ, "PYTHONPATH": str(tiny_runs.PACKAGE_ROOT), **marks}
        worker = subprocess.Popen(
            [sys.executable, str(tmp_path / "worker.py"), str(tmp_path), *delay], env=environment, cwd=tmp_path
        )
        trees.append(Tree(folder=tmp_path, worker=worker))
        return trees[-1]

    yield make
    for tree in trees:
        tree.worker.kill()
        tree.worker.wait()
        for pid in living(tree.pids("agent") + tree.pids("rank")):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["worker", "agent"])
def test_ranks_and_agent_die_with_what_started_them(grow, victim: str) -> None:
    tree = grow()
    assert wait_until(lambda: len(tree.pids("rank")) == 2, 10)
    family = tree.pids("agent") + tree.pids("rank")
    assert living(family) == family
    os.kill(tree.worker.pid if victim == "worker" else tree.pids("agent")[0], signal.SIGKILL)
    assert wait_until(lambda: not living(family), LIMIT_SECONDS), f"still alive: {living(family)}"


def test_nobody_is_hurt_while_the_tree_stands(grow) -> None:
    tree = grow(PYTHON_WORKER_FACTORY_SECRET="mark")
    assert wait_until(lambda: len(tree.pids("rank")) == 2, 10)
    family = tree.pids("agent") + tree.pids("rank")
    assert not wait_until(lambda: living(family) != family, 3 * guardian.POLL_SECONDS)


def test_a_rank_born_after_the_worker_died_ends_at_once(grow) -> None:
    tree = grow("1.5", PYTHON_WORKER_FACTORY_SECRET="mark")
    assert wait_until(lambda: tree.pids("agent"), 10)
    tree.worker.kill()
    tree.worker.wait()
    agent = tree.pids("agent")
    assert wait_until(lambda: not living(agent), 1.5 + LIMIT_SECONDS)
    assert tree.pids("rank") == []


def test_a_process_id_used_again_is_another_process() -> None:
    me = guardian.describe(os.getpid())
    assert me is not None
    assert me == guardian.describe(os.getpid())
    later = guardian.Process(pid=me.pid, started_ticks=me.started_ticks + 1)
    assert not guardian.orphaned(guardian.Lineage(agent=guardian.describe(os.getppid()), worker=None))
    assert not guardian._is_agent(later)


def test_gone_and_zombie_processes_are_not_living() -> None:
    child = subprocess.Popen(["true"])
    assert wait_until(lambda: guardian.describe(child.pid) is None, 5)  # a zombie until waited for
    child.wait()
    assert guardian.describe(child.pid) is None
