# SPDX-License-Identifier: Apache-2.0
"""The fake workspace's HTTP side: routes, tokens, faults, and a log of what was asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from deepspeed_provider.testing.answers import Refused
from deepspeed_provider.testing.faults import Fault, Faults

HOST: Final = "127.0.0.1"
LARGEST_BODY_BYTES: Final = 256 * 2**20
_START_SECONDS: Final = 30.0

Answer = Mapping[str, Any] | bytes | None
"""JSON, a file, or nothing (204)."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as it arrived.

    Attributes:
        path: what follows ``/api/2.x/``; for files the path of the file is in it.
        arguments: of the query, or of a JSON body, which the Databricks provider sends with an asynchronous GET too.
        data: the body of a PUT.
        status: answered; 0 where the connection was dropped.
    """

    method: str
    path: str
    version: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""
    status: int = 0


Handler = Callable[[Request], Answer]
Routes = Mapping[tuple[str, str], Handler]
"""By method and path; a path that ends with ``*`` stands for everything that begins so."""


class Server:
    """Serves one workspace over loopback, from a thread of its own, until it is stopped.

    Args:
        accepts: whether a bearer token is let in.
        page: HTML for people, by path.
    """

    def __init__(
        self, routes: Routes, *, accepts: Callable[[str], bool], faults: Faults, page: Callable[[str], str]
    ) -> None:
        self._routes = routes
        self._accepts = accepts
        self._faults = faults
        self._page = page
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self.port = 0
        self.requests: list[Request] = []

    def start(self, port: int = 0) -> None:
        """Listens; with port 0 on a free one. Raises OSError when the port is taken."""
        started = threading.Event()
        problems: list[BaseException] = []

        def serve() -> None:
            asyncio.set_event_loop(self._loop)
            try:
                runner = self._loop.run_until_complete(self._listen(port))
            except BaseException as error:  # noqa: BLE001  (whatever it is, the caller's thread raises it)
                problems.append(error)
                started.set()
                return
            started.set()
            self._loop.run_forever()
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()

        self._thread = threading.Thread(target=serve, name="fake-workspace", daemon=True)
        self._thread.start()
        started.wait(_START_SECONDS)
        if problems:
            raise problems[0]

    def stop(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_START_SECONDS)
            self._thread = None

    async def _listen(self, port: int) -> web.AppRunner:
        app = web.Application(client_max_size=LARGEST_BODY_BYTES)
        app.router.add_route("*", "/api/{version}/{path:.*}", self._api)
        app.router.add_get("/{path:.*}", self._show)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, HOST, port)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    async def _show(self, request: web.Request) -> web.Response:
        return web.Response(text=self._page(request.path_qs), content_type="text/html")

    async def _api(self, request: web.Request) -> web.StreamResponse:
        asked = await _read(request)
        fault = self._faults.take(asked.method, asked.path)
        response = self._respond(request, asked, fault)
        status = 0 if fault is not None and fault.drop else response.status
        self.requests.append(Request(**{**vars(asked), "status": status}))
        if fault is not None and fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault is not None and fault.drop and request.transport is not None:
            request.transport.abort()
        return response

    def _respond(self, request: web.Request, asked: Request, fault: Fault | None) -> web.Response:
        """The answer that the client gets; a fault that comes after the write replaces a real one."""
        instead = _of_fault(fault)
        if instead is not None and fault is not None and not fault.after:
            return instead
        if not self._accepts(request.headers.get("Authorization", "").removeprefix("Bearer ")):
            return _json(403, {"error_code": "PERMISSION_DENIED", "message": "Invalid access token."})
        try:
            answer = self._handler(asked)(asked)
        except Refused as refused:
            return instead or _json(refused.status, refused.body, refused.headers)
        return instead or _success(answer)

    def _handler(self, asked: Request) -> Handler:
        handler = self._routes.get((asked.method, asked.path))
        if handler is not None:
            return handler
        for (method, pattern), candidate in self._routes.items():
            if method == asked.method and pattern.endswith("*") and asked.path.startswith(pattern[:-1]):
                return candidate
        raise Refused(404, "ENDPOINT_NOT_FOUND", f"No API found for '{asked.method} /{asked.path}'")


async def _read(request: web.Request) -> Request:
    arguments: dict[str, Any] = dict(request.query)
    data = await request.read()
    if request.content_type == "application/json" and data and request.method != "PUT":
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        arguments |= body if isinstance(body, dict) else {}
    return Request(
        method=request.method,
        path=request.match_info["path"],
        version=request.match_info["version"],
        arguments=arguments,
        data=data if request.method == "PUT" else b"",
    )


def _of_fault(fault: Fault | None) -> web.Response | None:
    """A status of its own, or for a dropped connection an answer that nobody will see."""
    if fault is None or (fault.status is None and not fault.drop):
        return None
    return _json(fault.status or 500, fault.body or {}, fault.headers)


def _success(answer: Answer) -> web.Response:
    if answer is None:
        return web.Response(status=204)
    if isinstance(answer, bytes):
        return web.Response(body=answer, content_type="application/octet-stream")
    return _json(200, answer)


def _json(status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response(dict(body), status=status, headers=headers)
