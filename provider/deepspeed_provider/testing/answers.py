# SPDX-License-Identifier: Apache-2.0
"""What the fake workspace says when it refuses."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """An answer that is no success: ``{"error_code", "message"}`` with a status."""

    def __init__(self, status: int, error_code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.body: dict[str, Any] = {"error_code": error_code, "message": message}


def invalid(message: str) -> Refused:
    return Refused(400, "INVALID_PARAMETER_VALUE", message)


def missing(message: str) -> Refused:
    return Refused(404, "RESOURCE_DOES_NOT_EXIST", message)
