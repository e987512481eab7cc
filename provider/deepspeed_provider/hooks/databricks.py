# SPDX-License-Identifier: Apache-2.0
"""The Databricks provider's hook, with what it lacks for runs that must not be lost.

Connections and ways of authenticating are its own. Added: PUT and binary bodies, query parameters on an asynchronous
GET, a connection and token fetched anew when refused, ``Retry-After``, and no headers or payloads in logs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import requests
from airflow.providers.databricks.hooks.databricks import DatabricksHook
from airflow.providers.databricks.hooks.databricks_base import BearerAuth
from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException
from requests.auth import HTTPBasicAuth

from deepspeed_provider.backends.base import BackendUnavailable
from deepspeed_provider.backends.workspace_wire import WireRefused
from deepspeed_provider.errors import SpecError

CALL_TIMEOUT_SECONDS: Final = 60
ATTEMPTS: Final = 4
# One call waits so long at most; who asks for more patience is asked again by whoever waits for the run.
LONGEST_PAUSE_SECONDS: Final = 60.0
REFUSED: Final = (401, 403)
PASSING: Final = (429, 500, 502, 503, 504)
PASSING_CODES: Final = ("COULD_NOT_ACQUIRE_LOCK",)
STRAY: Final = (400, 404)
FILES: Final = "2.0/fs/"


def require_databricks(field: str, conn_id: str) -> None:
    """Raises :class:`SpecError` for a connection that is not there, or leads to no workspace."""
    works = f"Define it in Airflow, or as AIRFLOW_CONN_{conn_id.upper()}."
    try:
        found = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        raise SpecError.of(field, conn_id, "is not defined: Airflow has no such connection", works) from None
    if found.conn_type != DatabricksHook.conn_type:
        text = f"is a connection of the type {found.conn_type!r}"
        raise SpecError.of(field, conn_id, text, "Give one of the type databricks.")
    if not found.host:
        raise SpecError.of(field, conn_id, "has no host", "Give it the address of the workspace.")


class DatabricksWorkspaceHook(DatabricksHook):
    """Carries requests to one workspace (``WorkspaceWire``), in a worker and in an event loop.

    :param databricks_conn_id: connection of type ``databricks``.
    :param attempts: of a call that gets no answer or is put off; 1 for who has patience of its own.
    :param sleep, asleep: how a call waits before it asks again.
    """

    def __init__(
        self,
        databricks_conn_id: str = DatabricksHook.default_conn_name,
        *,
        attempts: int = ATTEMPTS,
        sleep: Callable[[float], None] = time.sleep,
        asleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(databricks_conn_id, timeout_seconds=CALL_TIMEOUT_SECONDS, caller="DeepSpeed")
        self._session: Any = None
        self._attempts = attempts
        self._sleep = sleep
        self._asleep = asleep

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return _object(self._call("GET", path, query=query))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return _object(self._call("POST", path, body=body))

    def upload(self, path: str, data: bytes) -> None:
        self._call("PUT", f"2.0/fs/files{quote(path)}", query={"overwrite": "true"}, data=data)

    def download(self, path: str) -> bytes:
        return self._call("GET", f"2.0/fs/files{quote(path)}").content

    async def aget(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """In an event loop; within ``async with`` this hook requests share their connections."""
        if self._session is None:
            async with self:
                return await self.aget(path, query)
        patience = _Patience(self._attempts, path)
        while True:
            try:
                await self._a_cache_databricks_conn()
                url = self._url(path)
                async with self._session.get(
                    url,
                    params={name: str(value) for name, value in (query or {}).items()},
                    headers={**self.user_agent_header, **await self._a_get_aad_headers()},
                    auth=await self._a_auth(),
                    timeout=aiohttp.ClientTimeout(total=self.timeout_seconds),
                    proxy=self._get_aiohttp_kwargs(url).get("proxy"),
                ) as response:
                    if response.ok:
                        answer: dict[str, Any] = await response.json(content_type=None)
                        return answer
                    refusal = _refusal(response.status, await response.text())
                    pause_s = patience.pause(refusal, response.headers.get("Retry-After"))
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                pause_s = patience.pause_without_answer(error)
            except AirflowException as error:
                raise BackendUnavailable(f"no token can be had: {error}") from error
            if pause_s is None:
                self.forget_token()
            else:
                await self._asleep(pause_s)

    def forget_token(self) -> None:
        """The next call reads the connection again, and asks for another token where tokens are asked for."""
        self.__dict__.pop("databricks_conn", None)
        self.oauth_tokens.clear()

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        data: bytes | None = None,
    ) -> requests.Response:
        patience = _Patience(self._attempts, path)
        while True:
            try:
                response = requests.request(
                    method,
                    self._url(path),
                    params=dict(query or {}),
                    json=None if body is None else dict(body),
                    data=data,
                    headers={**self.user_agent_header, **self._get_aad_headers()},
                    auth=self._auth(),
                    timeout=self.timeout_seconds,
                    **self._get_requests_kwargs(),
                )
            except requests.RequestException as error:
                self._sleep(patience.pause_without_answer(error))
                continue
            except AirflowException as error:
                raise BackendUnavailable(f"no token can be had: {error}") from error
            if response.ok:
                return response
            refusal = _refusal(response.status_code, response.text)
            pause_s = patience.pause(refusal, response.headers.get("Retry-After"))
            if pause_s is None:
                self.forget_token()
            else:
                self._sleep(pause_s)

    def _url(self, path: str) -> str:
        return str(self._endpoint_url(f"api/{path}"))  # type: ignore[no-untyped-call]

    def _auth(self) -> Any:
        token = self._get_token()
        if token:
            return _Bearer(token)
        return HTTPBasicAuth(self._get_connection_attr("login"), self.databricks_conn.password)

    async def _a_auth(self) -> Any:
        token = await self._a_get_token()
        if token:
            return BearerAuth(token)
        return aiohttp.BasicAuth(self._get_connection_attr("login"), self.databricks_conn.password)


class _Bearer(requests.auth.AuthBase):
    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class _Patience:
    """How one call goes on after something other than a success."""

    def __init__(self, most: int, path: str) -> None:
        self._most = most
        self._path = path
        self._attempts = 0
        self._token_renewed = False

    def pause(self, refusal: WireRefused, retry_after: str | None) -> float | None:
        """Seconds before the next attempt; None: at once, with another token. Raises where there is none."""
        if refusal.status in REFUSED and not self._token_renewed:
            self._token_renewed = True
            return None
        passing = refusal.status in PASSING or refusal.error_code in PASSING_CODES or self._is_stray(refusal)
        if not passing:
            refusal.after_silence = self._attempts > 0
            raise refusal
        asked_s = _seconds(retry_after)
        if asked_s is not None and asked_s > LONGEST_PAUSE_SECONDS:
            text = f"the workspace asks for {asked_s:g} s of patience: {refusal}"
            raise BackendUnavailable(text, retry_after_s=asked_s) from refusal
        return self._next(asked_s, refusal)

    def pause_without_answer(self, error: Exception) -> float:
        return self._next(None, error)

    def _is_stray(self, refusal: WireRefused) -> bool:
        """Not the API's own word, which has a code, but that of something between: a proxy's page says nothing about
        a run. That a file is missing may be told without a code."""
        may_be_missing = (
            refusal.status == 404 and self._path.startswith(FILES) and "<html" not in refusal.message.lower()
        )
        return refusal.status in STRAY and not refusal.error_code and not may_be_missing

    def _next(self, asked_s: float | None, error: Exception) -> float:
        self._attempts += 1
        if self._attempts >= self._most:
            text = f"the workspace does not answer: {type(error).__name__}: {error}"
            raise BackendUnavailable(text, retry_after_s=asked_s) from error
        return float(2 ** (self._attempts - 1)) if asked_s is None else asked_s


def _seconds(retry_after: str | None) -> float | None:
    """Of a ``Retry-After`` header, which may be a date too."""
    try:
        return None if retry_after is None else max(0.0, float(retry_after))
    except ValueError:
        return None


def _refusal(status: int, text: str) -> WireRefused:
    try:
        body = json.loads(text)
    except ValueError:
        body = {}
    found = body if isinstance(body, dict) else {}
    return WireRefused(status, str(found.get("error_code") or ""), str(found.get("message") or text[:500]))


def _object(response: requests.Response) -> dict[str, Any]:
    if not response.content:
        return {}
    answer = response.json()
    return answer if isinstance(answer, dict) else {}
