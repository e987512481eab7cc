# SPDX-License-Identifier: Apache-2.0
"""The seam between Airflow and a cluster: what every backend promises.

A backend is stateless between calls: everything it needs to find a run again is in the
``RunHandle``, which is small, holds no secret, and survives as JSON in Airflow's task state store.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run, on how many processes, and where it leaves its files.

    Attributes:
        entry: ``"package.module:function"``, importable from ``code``. Called once in every rank
            as ``function(payload)``; what rank 0 returns (JSON-able) is the run's result.
        on_driver: call the entry once where the cluster's driver is, beside its own Spark session, and start no
            ranks. Only for backends whose runs have a driver of their own.
        payload: JSON-able argument of the entry; no secrets.
        code: files or package folders on the submitting machine that travel with the run.
        nodes: machines; ``gpus_per_node`` ranks on each. World size is their product.
        use_gpu: False trains on CPU with the gloo back end.
        deepspeed_config: handed to ``DeepspeedTorchDistributor``.
        output_uri: folder URI of this run, reachable from the cluster. Ranks write
            ``progress.json``, ``failure-rank<N>.json`` and ``result.json`` there.
        environment: extra environment variables of the ranks; no secrets.
        name: for people who look at the cluster's own list of runs.
        python: minor version, such as ``3.12``, that alone reads what is pickled in the payload; empty for any.
        timeout_s: after which the platform itself should stop the run, should nobody else be left to do it.
    """

    entry: str
    payload: Mapping[str, Any]
    code: tuple[str, ...]
    output_uri: str
    nodes: int = 1
    gpus_per_node: int = 1
    use_gpu: bool = True
    deepspeed_config: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    python: str = ""
    timeout_s: float | None = None
    on_driver: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def digest(self) -> str:
        """Digest of what would run; equal requests have equal digests."""
        wire = json.dumps(
            [self.entry, self.payload, self.nodes, self.gpus_per_node, self.use_gpu, self.deepspeed_config],
            sort_keys=True,
            default=str,
        )
        return hashlib.sha256(wire.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Who a run is. Two submissions with equal identities are one run.

    ``key`` names the Airflow task (dag, run, task, map index), ``generation`` counts the runs that
    were judged terminal before this one, ``digest`` is the digest of the request.
    """

    key: str
    generation: int
    digest: str

    @property
    def token(self) -> str:
        """Idempotency token: 40 hexadecimal digits (the Jobs API allows 64 characters)."""
        return hashlib.sha256(f"{self.key}\n{self.generation}\n{self.digest}".encode()).hexdigest()[:40]

    def uuid(self, purpose: str) -> str:
        """A version-4 UUID that this identity always gives for ``purpose``."""
        raw = hashlib.sha256(f"{purpose}\n{self.token}".encode()).digest()[:16]
        return str(uuid.UUID(bytes=raw, version=4))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHandle:
    """How to find a run again from any process. ``ids`` is the backend's own business."""

    backend: str
    token: str
    generation: int
    output_uri: str
    world_size: int
    ids: Mapping[str, str]

    @classmethod
    def minted(cls, backend: str, request: RunRequest, identity: RunIdentity, **ids: str) -> RunHandle:
        """Of a run that this identity has, before anything is sent."""
        return cls(
            backend=backend,
            token=identity.token,
            generation=identity.generation,
            output_uri=request.output_uri,
            world_size=request.world_size,
            ids=ids,
        )

    def with_ids(self, **ids: str) -> RunHandle:
        """With what the cluster calls the run."""
        return replace(self, ids={**self.ids, **ids})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ids": dict(self.ids)}

    @classmethod
    def from_json(cls, wire: Mapping[str, Any]) -> RunHandle:
        return cls(**{name: wire[name] for name in cls.__dataclass_fields__})


class RunState(StrEnum):
    """State of a run as the cluster tells it. Anything a backend does not know is ``RUNNING``."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    TERMINATING = "TERMINATING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"
    """The cluster holds no such run: it never arrived, or was lost with its server."""
    UNSEEN = "UNSEEN"
    """Nothing of it is alive, and only submitting it again, which is idempotent, tells whether it ever arrived."""

    @property
    def terminal(self) -> bool:
        return self in (RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED, RunState.LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    state: RunState
    detail: str = ""
    """What the platform calls the state, and its message where it has one."""
    by_person: bool = False
    """Of a cancelled run: somebody asked for it, rather than the platform. That somebody may be us."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """What the cluster calls the run, where the handle did not say so and it was found anyway."""


class BackendUnavailable(Exception):
    """The cluster did not answer. Says nothing about the run: ask again, until a deadline.

    Attributes:
        retry_after_s: for how long the cluster wants to be left alone, where it says so.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Backend(Protocol):
    """Six verbs. Every one may be called from a process that never saw the others being called.

    All raise ``BackendUnavailable`` when the cluster cannot be reached.
    """

    name: str

    def mint(self, request: RunRequest, identity: RunIdentity) -> RunHandle:
        """The handle that this identity has, before anything is sent. Pure."""
        ...

    def submit(self, request: RunRequest, handle: RunHandle) -> RunHandle:
        """Start the run unless the cluster already holds it. Idempotent under the handle."""
        ...

    def poll(self, handle: RunHandle) -> RunStatus:
        """Where the run is; also keeps it alive where the cluster wants to hear from us."""
        ...

    def result(self, handle: RunHandle) -> Any:
        """What rank 0 returned. Raises ``FineTuneError`` when the run failed or has no result."""
        ...

    def cancel(self, handle: RunHandle) -> None:
        """Ask the cluster to stop the run. Idempotent; ``poll`` tells when it has stopped."""
        ...

    def read_texts(self, uri_pattern: str) -> dict[str, str]:
        """Small text files that match a glob URI, read by the cluster: file name to text."""
        ...


@runtime_checkable
class Billed(Protocol):
    """A backend whose runs cost money by the hour."""

    def billed_seconds(self, handle: RunHandle, now_ms: float) -> float | None:
        """How long the run's cluster has been paid for; None where nothing is known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPages:
    """Addresses for people; None where there is no such page, or not yet."""

    run: str | None = None
    cluster_logs: str | None = None


@runtime_checkable
class WithPages(Protocol):
    """A backend whose runs have pages that people can look at."""

    def pages(self, handle: RunHandle) -> RunPages:
        """A page of logs is there when the run has got its cluster."""
        ...
