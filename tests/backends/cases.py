"""What the contract suite needs to know of a backend. A new backend adds one case."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_provider.backends.base import Backend, RunHandle, RunIdentity, RunRequest

from backends.marks import Marks


@dataclass(frozen=True, kw_only=True)
class BackendCase:
    """One backend under test.

    Attributes:
        connect: a new client, as another process would make it.
        unreachable: a client whose cluster is not there.
        count_runs: how many runs the cluster itself says it started for a handle.
    """

    name: str
    connect: Callable[[], Backend]
    unreachable: Callable[[], Backend]
    count_runs: Callable[[RunHandle], int]
    folder: Path

    def request(self, **payload: Any) -> tuple[RunRequest, Marks]:
        """A request for the trivial training on two ranks, and where its ranks leave their marks."""
        name = uuid.uuid4().hex
        marks = Marks(self.folder / f"marks-{name}")
        request = RunRequest(
            entry="trivial_training:main",
            payload={"name": name, "marks": str(marks.path), **payload},
            code=(str(Path(__file__).with_name("trivial_training.py")),),
            output_uri=(self.folder / name).as_uri(),
            gpus_per_node=2,
            use_gpu=False,
        )
        return request, marks

    def identity(self, request: RunRequest, generation: int = 1) -> RunIdentity:
        return RunIdentity(key=request.payload["name"], generation=generation, digest=request.digest)
