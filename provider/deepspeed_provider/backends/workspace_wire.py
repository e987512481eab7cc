# SPDX-License-Identifier: Apache-2.0
"""What the Jobs backend asks of whoever carries its requests to a Databricks workspace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class WireRefused(Exception):
    """The workspace has answered, and its answer is no: asking again would not help.

    Attributes:
        status: of HTTP. error_code: the API's own, such as ``INVALID_PARAMETER_VALUE``.
        after_silence: the same request was sent before without an answer, and may have been carried out then.
    """

    def __init__(self, status: int, error_code: str, message: str) -> None:
        super().__init__(f"{error_code or status}: {message}")
        self.status = status
        self.error_code = error_code
        self.message = message
        self.after_silence = False

    def __reduce__(self) -> tuple[Any, ...]:
        # From one process to another.
        return type(self), (self.status, self.error_code, self.message), {"after_silence": self.after_silence}

    @property
    def of_token(self) -> bool:
        """Whether it may be the token that is refused; a workspace says so with 401, or with 403 and a word on it."""
        return self.status == 401 or (self.status == 403 and "token" in self.message.lower())


class WorkspaceWire(Protocol):
    """Requests to one workspace. ``path`` is what follows ``/api/``, such as ``2.2/jobs/runs/get``.

    All raise :class:`WireRefused` for a refusal, and ``BackendUnavailable`` when there is no answer, the workspace asks
    for patience for longer than a call may take, or the token is refused though it was fetched anew.
    """

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]: ...

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]: ...

    def upload(self, path: str, data: bytes) -> None:
        """Writes one file of a Volume, an absolute path, over what is there."""
        ...

    def download(self, path: str) -> bytes:
        """One file of a Volume."""
        ...

    async def aget(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]: ...
