# SPDX-License-Identifier: Apache-2.0
"""Secret scopes on the fake workspace: written and listed; read by what runs on a cluster."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, Final

from deepspeed_provider.testing.answers import Refused, missing
from deepspeed_provider.testing.clock import VirtualClock

REFERENCE: Final = re.compile(r"\{\{secrets/([^/{}]+)/([^/{}]+)\}\}")


class SecretScopes:
    """Secrets by scope and key."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.scopes: dict[str, dict[str, str]] = {}

    def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /api/2.0/secrets/scopes/create``."""
        if body["scope"] in self.scopes:
            raise Refused(400, "RESOURCE_ALREADY_EXISTS", f"Scope {body['scope']} already exists!")
        self.scopes[body["scope"]] = {}
        return {}

    def list_scopes(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/secrets/scopes/list``."""
        return {"scopes": [{"name": name, "backend_type": "DATABRICKS"} for name in self.scopes]}

    def put(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /api/2.0/secrets/put``."""
        text = body.get("string_value")
        value = base64.b64decode(body.get("bytes_value", "")).decode() if text is None else str(text)
        self._scope(body)[body["key"]] = value
        return {}

    def list(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/secrets/list``: names only."""
        now_ms = self._clock.now_ms
        return {"secrets": [{"key": key, "last_updated_timestamp": now_ms} for key in self._scope(query)]}

    def get(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/secrets/get``: the value in base64."""
        scope = self._scope(query)
        if query["key"] not in scope:
            raise missing(f"Secret {query['key']} does not exist in scope {query['scope']}.")
        return {"key": query["key"], "value": base64.b64encode(scope[query["key"]].encode()).decode()}

    def resolve(self, text: str) -> str:
        """``text`` as a cluster sees it: references such as ``{{secrets/scope/key}}`` filled in. Raises KeyError."""
        return REFERENCE.sub(lambda found: self.scopes[found[1]][found[2]], text)

    def _scope(self, body: Mapping[str, Any]) -> dict[str, str]:
        if body.get("scope") not in self.scopes:
            raise missing(f"Scope {body.get('scope')} does not exist!")
        return self.scopes[body["scope"]]
