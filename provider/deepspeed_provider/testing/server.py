# SPDX-License-Identifier: Apache-2.0
"""The fake workspace's HTTP side: routes, tokens, faults, and a log of what was asked."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from typing import Any, Final

from aiohttp import web

from deepspeed_provider.testing.answers import Refused
from deepspeed_provider.testing.faults import Fault, Faults
from deepspeed_provider.testing.files import File

HOST: Final = "127.0.0.1"
LARGEST_BODY_BYTES: Final = 256 * 2**20
_START_SECONDS: Final = 30.0
# What still waits for its answer when the server stops, such as one that is to come late.
_SHUTDOWN_SECONDS: Final = 0.5
_NO_LINGER: Final = struct.pack("ii", 1, 0)  # a socket that is closed so is reset

Answer = Mapping[str, Any] | File | None
"""JSON, a file, or nothing (204)."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as it arrived.

    Attributes:
        path: what follows ``/api/2.x/``; for files the path of the file is in it.
        arguments: of the query, or of a JSON body, which the Databricks provider sends with an asynchronous GET too.
        query: those of them that came in the query.
        data: the body of a PUT.
        status: answered; 0 where the connection was dropped.
    """

    method: str
    path: str
    version: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    data: bytes = b""
    status: int = 0


Handler = Callable[[Request], Answer]
Routes = Mapping[tuple[str, str], Handler]
"""By method and path; a path that ends with ``*`` stands for everything that begins so."""
MALFORMED: Final[Mapping[str, Any]] = {}
"""The arguments of a request whose body cannot be read."""


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
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] = lambda: None
        self.port = 0
        self.requests: list[Request] = []

    def start(self, port: int = 0) -> None:
        """Listens; with port 0 on a free one. Raises OSError when the port is taken."""
        if self._thread is not None:
            raise RuntimeError("The fake workspace is running already.")
        bound: Future[int] = Future()
        thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(port, bound)), name="fake-workspace", daemon=True
        )
        thread.start()
        self.port = bound.result(_START_SECONDS)
        self._thread = thread

    def stop(self) -> None:
        """Returns when its thread and its sockets are gone."""
        if self._thread is not None:
            self._stop()
            self._thread.join()
            self._thread = None

    async def _serve(self, port: int, bound: Future[int]) -> None:
        """Tells the port, or why there is none, and serves until it is told to stop."""
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stopped.set)
        app = web.Application(client_max_size=LARGEST_BODY_BYTES)
        app.router.add_route("*", "/api/{version}/{path:.*}", self._api)
        app.router.add_get("/", self._show)
        app.router.add_get("/.well-known/{path:.*}", _nothing)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, port).start()
        except OSError as error:
            bound.set_exception(error)
        else:
            bound.set_result(runner.addresses[0][1])
            await stopped.wait()
        finally:
            await runner.cleanup()

    async def _show(self, request: web.Request) -> web.Response:
        return web.Response(text=self._page(request.path_qs), content_type="text/html")

    async def _api(self, request: web.Request) -> web.StreamResponse:
        asked = await _read(request)
        fault = self._faults.take(asked.method, asked.path)
        response = self._respond(request, asked, fault)
        status = 0 if fault is not None and fault.drop else response.status
        self.requests.append(replace(asked, status=status))
        if fault is not None and fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault is not None and fault.drop and request.transport is not None:
            if fault.reset:
                request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            request.transport.abort()
        return response

    def _respond(self, request: web.Request, asked: Request, fault: Fault | None) -> web.Response:
        """The answer that the client gets; a fault that comes after the write replaces a real one."""
        instead = _of_fault(fault)
        if instead is not None and fault is not None and not fault.after:
            return instead
        try:
            self._let_in(request.headers.get("Authorization", ""))
            handler = self._handler(asked)
            if fault is not None and fault.twice:
                handler(asked)
            answer = handler(asked)
        except Refused as refused:
            return instead or _json(refused.status, refused.body)
        return instead or _success(answer)

    def _let_in(self, authorization: str) -> None:
        if not authorization:
            raise Refused(401, "UNAUTHENTICATED", "Credential was not sent.")
        if not self._accepts(authorization.removeprefix("Bearer ")):
            raise Refused(403, "PERMISSION_DENIED", "Invalid access token.")

    def _handler(self, asked: Request) -> Handler:
        if asked.arguments is MALFORMED:
            raise Refused(400, "MALFORMED_REQUEST", "The body should be a JSON object.")
        handler = self._routes.get((asked.method, asked.path))
        if handler is not None:
            return handler
        for (method, pattern), candidate in self._routes.items():
            if method == asked.method and pattern.endswith("*") and asked.path.startswith(pattern[:-1]):
                return candidate
        raise Refused(404, "ENDPOINT_NOT_FOUND", f"No API found for '{asked.method} /{asked.path}'")


async def _nothing(request: web.Request) -> web.Response:
    """The SDK's client asks here for what it is told anyway, and reads JSON only."""
    return _json(404, {"error_code": "ENDPOINT_NOT_FOUND", "message": f"No API found for '{request.path}'"})


async def _read(request: web.Request) -> Request:
    data = await request.read()
    asked = Request(
        method=request.method,
        path=request.match_info["path"],
        version=request.match_info["version"],
        arguments=dict(request.query),
        query=dict(request.query),
        data=data if request.method == "PUT" else b"",
    )
    if request.method == "PUT" or not data:
        return asked
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    return replace(asked, arguments={**asked.arguments, **body} if isinstance(body, dict) else MALFORMED)


def _of_fault(fault: Fault | None) -> web.Response | None:
    """A status of its own, or for a dropped connection an answer that nobody will see."""
    if fault is None or (fault.status is None and not fault.drop):
        return None
    return _json(fault.status or 500, fault.body or {}, fault.headers)


def _success(answer: Answer) -> web.Response:
    if answer is None:
        return web.Response(status=204)
    if isinstance(answer, File):
        headers = {"Last-Modified": formatdate(answer.modified_ms / 1000, usegmt=True)}
        return web.Response(body=answer.data, content_type="application/octet-stream", headers=headers)
    return _json(200, answer)


def _json(status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response(dict(body), status=status, headers=headers)
