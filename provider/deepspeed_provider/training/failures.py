# SPDX-License-Identifier: Apache-2.0
"""From an exception in one rank to the failure file that Airflow judges.

Kinds are the strings of ``FailureKind`` on the Airflow side, repeated here because this package
travels alone. The file is written before the rank exits: the distributor's own error text keeps only
the last 100 lines, in which the cause is often gone.
"""

from __future__ import annotations

import re
import socket
import traceback
from dataclasses import dataclass
from typing import Any

USER, GPU_OOM, HOST_OOM, TRANSIENT, UNKNOWN = "USER", "GPU_OOM", "HOST_OOM", "TRANSIENT", "UNKNOWN"
TRACEBACK_LINES = 40


class InputError(ValueError):
    """The plan, the model or the data cannot be used; the message says what would work."""


class AlreadyStarted(RuntimeError):
    """This generation has run before: the cluster retried what must run once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One row: an exception whose class chain holds ``type_name`` and whose text matches is ``kind``."""

    kind: str
    type_name: str = ""
    pattern: str = ""

    def matches(self, type_names: set[str], text: str) -> bool:
        if self.type_name and self.type_name not in type_names:
            return False
        return not self.pattern or re.search(self.pattern, text, re.IGNORECASE) is not None


# First match wins: memory before echoes, since a rank out of memory may also report a broken collective.
SIGNATURES = (
    # torch.OutOfMemoryError, named torch.cuda.OutOfMemoryError before torch 2.5
    Signature(kind=GPU_OOM, type_name="OutOfMemoryError"),
    Signature(
        kind=GPU_OOM, type_name="RuntimeError", pattern=r"CUDA (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    ),
    Signature(kind=HOST_OOM, type_name="MemoryError"),
    # c10/core/impl/alloc_cpu.cpp, torch 2.13
    Signature(
        kind=HOST_OOM, type_name="RuntimeError", pattern=r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    ),
    Signature(kind=HOST_OOM, type_name="OSError", pattern=r"\[Errno 12\]|Cannot allocate memory"),
    Signature(kind=USER, type_name="InputError"),
    Signature(kind=UNKNOWN, type_name="AlreadyStarted"),
    # Libraries that the cluster lacks; DeepSpeed's and pydantic's refusal of a configuration
    Signature(kind=USER, type_name="ImportError"),
    Signature(kind=USER, type_name="DeepSpeedConfigError"),
    Signature(kind=USER, type_name="ValidationError"),
    # torch.distributed: DistBackendError, DistNetworkError, DistStoreError derive from DistError
    Signature(kind=TRANSIENT, type_name="DistError"),
    Signature(kind=TRANSIENT, type_name="RendezvousError"),
    Signature(kind=TRANSIENT, type_name="ConnectionError"),
    Signature(kind=TRANSIENT, type_name="TimeoutError"),
    Signature(
        kind=TRANSIENT,
        type_name="RuntimeError",
        pattern=r"NCCL|gloo|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|collective.*time",
    ),
)


def kind_of(error: BaseException) -> str:
    """The kind of the first exception in the chain that a signature knows, outermost first."""
    seen: BaseException | None = error
    while seen is not None:
        names = {base.__name__ for base in type(seen).__mro__}
        for signature in SIGNATURES:
            if signature.matches(names, str(seen)):
                return signature.kind
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return UNKNOWN


def failure_record(
    error: BaseException,
    *,
    rank: int,
    phase: str,
    step: int | None,
    peak_memory_bytes: int | None,
    time_s: float,
) -> dict[str, Any]:
    """The failure file's content, JSON-able."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {
        "kind": kind_of(error),
        "type": type(error).__qualname__,
        "message": str(error) or type(error).__qualname__,
        "traceback": "\n".join(lines[-TRACEBACK_LINES:]),
        "rank": rank,
        "step": step,
        "peak_memory_bytes": peak_memory_bytes,
        "phase": phase,
        "time": time_s,
        "host": socket.gethostname(),
    }
