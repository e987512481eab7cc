# SPDX-License-Identifier: Apache-2.0
"""Which of several ranks' failures is the cause. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from deepspeed_provider.errors import Failure, FailureKind

DETAIL_LINES: Final = 20


def cause(records: Iterable[Mapping[str, Any]]) -> Failure | None:
    """The failure that came first among what the ranks wrote (``training/failures.py``); others are left out.

    A rank whose peer has died reports a broken or timed-out collective, sometimes before the peer's own
    record: such echoes lose against any real cause.
    """
    known = [record for record in records if isinstance(record.get("kind"), str)]
    if not known:
        return None
    first = min(known, key=lambda record: (_is_echo(record), _number(record.get("time"), float("inf"))))
    kind = first["kind"] if first["kind"] in FailureKind.__members__ else FailureKind.UNKNOWN
    name, message = first.get("type"), str(first.get("message") or "no message")
    rank = first.get("rank", "?")
    return Failure(
        kind=FailureKind(kind),
        message=f"{name}: {message}" if name and not message.startswith(str(name)) else message,
        evidence="driver" if rank is None else f"failure file of rank {rank}",
        rank=first.get("rank"),
        step=first.get("step"),
        detail=last_lines(str(first.get("traceback") or "")),
    )


def last_lines(text: str, count: int = DETAIL_LINES) -> str:
    """The last ``count`` lines of a text."""
    return "\n".join(text.rstrip().splitlines()[-count:])


def _is_echo(record: Mapping[str, Any]) -> bool:
    return record["kind"] == FailureKind.TRANSIENT or record.get("type") == "AlreadyStarted"


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) else default
