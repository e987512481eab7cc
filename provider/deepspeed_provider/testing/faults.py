# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between a client and the fake workspace."""

from __future__ import annotations

import fnmatch
import random
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

EVERYTHING: Final = "*"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way for a request to go wrong.

    Attributes:
        status: answered instead; None drops the connection without an answer.
        after: the request is carried out first, and only its answer is lost or replaced.
        reset: with ``drop``, the connection is reset (RST) rather than closed (FIN), which clients tell apart.
        twice: the request is carried out twice, as when something between sends it again; the second answer counts.
        delay_s: real seconds before the answer, which then is the usual one where there is neither status nor drop.
    """

    status: int | None = None
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None
    after: bool = False
    drop: bool = False
    reset: bool = False
    twice: bool = False
    delay_s: float = 0.0


def too_many_requests(retry_after_s: int | None = 30) -> Fault:
    """429 ``REQUEST_LIMIT_EXCEEDED``."""
    return Fault(
        status=429,
        body={
            "error_code": "REQUEST_LIMIT_EXCEEDED",
            "message": "The request rate limit of the workspace was exceeded.",
        },
        headers={} if retry_after_s is None else {"Retry-After": str(retry_after_s)},
    )


def server_error(status: int = 503, *, retry_after_s: int | None = None, after: bool = False) -> Fault:
    return Fault(
        status=status,
        body={"error_code": "TEMPORARILY_UNAVAILABLE", "message": "The service is temporarily unavailable."},
        headers={} if retry_after_s is None else {"Retry-After": str(retry_after_s)},
        after=after,
    )


def refused_token(status: int = 403) -> Fault:
    """401 or 403 for a token that is good."""
    error_code = "UNAUTHENTICATED" if status == 401 else "PERMISSION_DENIED"
    return Fault(status=status, body={"error_code": error_code, "message": "Invalid access token."})


def could_not_acquire_lock() -> Fault:
    """A 400 that passes."""
    return Fault(status=400, body={"error_code": "COULD_NOT_ACQUIRE_LOCK", "message": "Could not acquire lock."})


def stray_page(status: int = 404) -> Fault:
    """What something between says, and not the API, whose refusals have a code."""
    return Fault(status=status, body={"message": "<html><title>nginx: not found</title></html>"})


def unknown_run() -> Fault:
    """The API's own word for a run that it does not know, of one that is there."""
    return Fault(status=400, body={"error_code": "INVALID_PARAMETER_VALUE", "message": "Run 7 does not exist."})


def lost_response() -> Fault:
    """The request arrives and is carried out; the connection breaks before its answer."""
    return Fault(after=True, drop=True)


def lost_request() -> Fault:
    """The connection breaks before anything is carried out."""
    return Fault(drop=True)


def reset_connection() -> Fault:
    """As ``lost_request``, but the client is told so by a reset, as load balancers do it."""
    return Fault(drop=True, reset=True)


def sent_twice() -> Fault:
    """The request arrives twice."""
    return Fault(twice=True)


def late(seconds: float) -> Fault:
    return Fault(delay_s=seconds)


def every_kind(*, late_s: float = 2.0, retry_after_s: int = 5, long_retry_after_s: int = 30) -> dict[str, Fault]:
    """By name, all that passes when it is asked again; in real seconds."""
    return {
        "request lost": lost_request(),
        "answer lost": lost_response(),
        "connection reset": reset_connection(),
        "answered late": late(late_s),
        "sent twice": sent_twice(),
        "429 with a time": too_many_requests(retry_after_s),
        "429 with a long time": too_many_requests(long_retry_after_s),
        "429": too_many_requests(None),
        "503": server_error(503),
        "500 after the write": server_error(500, after=True),
        "401": refused_token(401),
        "a 400 that passes": could_not_acquire_lock(),
        "a stray 404": stray_page(404),
        "a stray 400": stray_page(400),
    }


@dataclass
class _Planned:
    method: str
    path: str
    fault: Fault
    skip: int
    left: int


class Faults:
    """The faults to come, in the order in which they were planned."""

    def __init__(self) -> None:
        self._planned: list[_Planned] = []
        self._lock = threading.Lock()

    def plan(
        self, fault: Fault, *, path: str = EVERYTHING, method: str = EVERYTHING, times: int = 1, skip: int = 0
    ) -> None:
        """The next ``times`` requests that match go wrong, after ``skip`` that don't.

        Args:
            path: a glob over what follows ``/api/2.x/``, such as ``jobs/runs/get`` or ``fs/*``.
        """
        with self._lock:
            self._planned.append(_Planned(method=method, path=path, fault=fault, skip=skip, left=times))

    def clear(self) -> None:
        with self._lock:
            self._planned.clear()

    def take(self, method: str, path: str) -> Fault | None:
        """The fault of this request."""
        with self._lock:
            for planned in self._planned:
                if not planned.left or not fnmatch.fnmatchcase(method, planned.method):
                    continue
                if not fnmatch.fnmatchcase(path, planned.path):
                    continue
                if planned.skip:
                    planned.skip -= 1
                    continue
                planned.left -= 1
                return planned.fault
        return None


class RandomFaults(Faults):
    """A share of all requests goes wrong, each in one way of several, beside what is planned.

    Args:
        share: from 0 to 1.
        kinds: by name; default: ``every_kind()``.
        chance: seeded, for the same faults again.

    Attributes:
        taken: how often each kind came.
    """

    def __init__(
        self, share: float, *, kinds: Mapping[str, Fault] | None = None, chance: random.Random | None = None
    ) -> None:
        super().__init__()
        self._share = share
        self._kinds = every_kind() if kinds is None else kinds
        self._chance = chance or random.Random()
        self.taken: Counter[str] = Counter()

    def take(self, method: str, path: str) -> Fault | None:
        planned = super().take(method, path)
        if planned is not None:
            return planned
        with self._lock:
            if self._chance.random() >= self._share:
                return None
            name = self._chance.choice(list(self._kinds))
            self.taken[name] += 1
        return self._kinds[name]
