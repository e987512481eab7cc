# SPDX-License-Identifier: Apache-2.0
"""Secret scopes on the fake workspace: written and listed; read by what runs on a cluster.

Source: databricks-sdk 0.162, ``workspace.SecretsAPI``.
"""

from __future__ import annotations

import base64
import binascii
import re
import threading
from collections.abc import Mapping
from typing import Any, Final

from deepspeed_provider.testing.answers import Refused, invalid, missing, text
from deepspeed_provider.testing.clock import VirtualClock

REFERENCE: Final = re.compile(r"\{\{secrets/([^/{}]+)/([^/{}]+)\}\}")


class SecretScopes:
    """Secrets by scope and key; safe to use from several threads.

    Attributes:
        scopes: texts by scope and key.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self.scopes: dict[str, dict[str, str]] = {}
        self._updated_ms: dict[tuple[str, str], int] = {}

    def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /api/2.0/secrets/scopes/create``."""
        name = text(body, "scope")
        with self._lock:
            if name in self.scopes:
                raise Refused(400, "RESOURCE_ALREADY_EXISTS", f"Scope {name} already exists!")
            self.scopes[name] = {}
        return {}

    def list_scopes(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/secrets/scopes/list``."""
        with self._lock:
            return {"scopes": [{"name": name, "backend_type": "DATABRICKS"} for name in sorted(self.scopes)]}

    def delete_scope(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /api/2.0/secrets/scopes/delete``."""
        with self._lock:
            self._scope(body)
            del self.scopes[body["scope"]]
        return {}

    def put(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /api/2.0/secrets/put``, of a text; the real one takes any bytes."""
        key = text(body, "key")
        if ("string_value" in body) == ("bytes_value" in body):
            raise invalid("Give either string_value or bytes_value.")
        try:
            value = body["string_value"] if "string_value" in body else base64.b64decode(body["bytes_value"]).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise invalid("bytes_value should be a text in base64.") from error
        with self._lock:
            self._scope(body)[key] = value
            self._updated_ms[body["scope"], key] = self._clock.now_ms
        return {}

    def list(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/secrets/list``: names only."""
        with self._lock:
            scope = query.get("scope", "")
            return {
                "secrets": [
                    {"key": key, "last_updated_timestamp": self._updated_ms.get((scope, key), self._clock.now_ms)}
                    for key in sorted(self._scope(query))
                ]
            }

    def get(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/secrets/get``: the value in base64."""
        key = text(query, "key")
        with self._lock:
            value = self._value(query, key)
        return {"key": key, "value": base64.b64encode(value.encode()).decode()}

    def delete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /api/2.0/secrets/delete``."""
        key = text(body, "key")
        with self._lock:
            self._value(body, key)
            del self._scope(body)[key]
        return {}

    def resolve(self, written: str) -> str:
        """A text as a cluster sees it: references such as ``{{secrets/scope/key}}`` filled in. Raises KeyError."""
        return REFERENCE.sub(lambda found: self.scopes[found[1]][found[2]], written)

    def _scope(self, body: Mapping[str, Any]) -> dict[str, str]:
        name = text(body, "scope")
        if name not in self.scopes:
            raise missing(f"Scope {name} does not exist!")
        return self.scopes[name]

    def _value(self, body: Mapping[str, Any], key: str) -> str:
        scope = self._scope(body)
        if key not in scope:
            raise missing(f"Secret {key} does not exist in scope {body['scope']}.")
        return scope[key]
