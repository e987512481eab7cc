# SPDX-License-Identifier: Apache-2.0
"""Asks one workspace about all runs that triggers of one event loop wait for."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import islice
from typing import Final
from weakref import WeakKeyDictionary

from deepspeed_provider.backends.base import BackendUnavailable, RunStatus
from deepspeed_provider.backends.jobs_queries import active_runs, patience, status_in_loop
from deepspeed_provider.backends.jobs_states import status_of
from deepspeed_provider.backends.workspace_wire import WorkspaceWire

JITTER: Final = 0.2
LONGEST_PAUSE_S: Final = 300.0
MOST_DOUBLINGS: Final = 16
# After so many rounds at most it is seen anew whether listing has become cheaper than asking one by one.
MOST_ROUNDS_WITHOUT_LIST: Final = 32
# Of so many runs the progress may be read between two rounds, in turn: it costs a request each.
PROGRESS_A_ROUND: Final = 2
# Side by side at most.
REQUESTS_AT_ONCE: Final = 8


class WorkspacePoller:
    """One task that asks, and many that wait for its answers.

    Each round it either lists the active runs, 25 a page, and gets those by themselves that are no longer among them,
    or gets every run by itself, whichever takes fewer requests: the pages also hold runs of others.

    Args:
        wire: answers at once or not at all; the poller is the one who is patient.
    """

    def __init__(
        self,
        wire: WorkspaceWire,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._wire = wire
        self._sleep = sleep
        self._clock = clock
        self._jitter = jitter
        self._waiting: dict[str, list[asyncio.Future[RunStatus]]] = {}
        self._intervals_s: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._refusals = 0
        self._asked_pause_s = 0.0
        self._rounds_without_list = 0
        self._skipped = 0
        self._turns: deque[str] = deque()

    def may_read_progress(self, run_id: str) -> bool:
        """Whether it is this run's turn: a few have theirs after each round."""
        return run_id in islice(self._turns, PROGRESS_A_ROUND)

    async def status(self, run_id: str, interval_s: float) -> RunStatus:
        """The run's state at the next round, which comes within about ``interval_s`` seconds.

        Raises BackendUnavailable when that round had no answer; the next one comes later.
        """
        future: asyncio.Future[RunStatus] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run_id, []).append(future)
        self._intervals_s[run_id] = interval_s
        if self._task is None:
            self._task = asyncio.create_task(self._rounds())
        return await future

    async def _rounds(self) -> None:
        try:
            lasted_s = 0.0
            while self._waiting:
                await self._sleep(self._pause_after(lasted_s))
                began_s = self._clock()
                await self._round()
                lasted_s = self._clock() - began_s
                # Who was told asks again now, if at all.
                await asyncio.sleep(0)
        finally:
            # Nothing is awaited after the last look: whoever asks from now on starts another task.
            self._task = None
            for run_id in list(self._waiting):
                self._tell(run_id, None, BackendUnavailable("the poller was interrupted"))

    def _pause_after(self, lasted_s: float) -> float:
        """Before the next round; ``lasted_s``: how long the last one took."""
        pause_s = self._pause_s()
        if self._refusals:
            return pause_s
        # What a long round tells is old by then: the next begins earlier by that, so that an end is told as soon as by
        # somebody who asks for that run alone.
        return max(pause_s / 2, pause_s - 3 * lasted_s)

    def _pause_s(self) -> float:
        wanted = min((self._intervals_s[run_id] for run_id in self._waiting), default=0.0)
        pause_s: float = min(wanted * 2 ** min(self._refusals, MOST_DOUBLINGS), max(wanted, LONGEST_PAUSE_S))
        # Never later than asked for, but for the workspace's sake.
        return max(pause_s * (1 - JITTER * self._jitter()), self._asked_pause_s)

    async def _round(self) -> None:
        asked = {run_id for run_id, futures in self._waiting.items() if not all(map(_done, futures))}
        for run_id in self._waiting.keys() - asked:
            self._forget(run_id)  # whoever waited has gone
        self._take_turns(sorted(asked))
        try:
            # Connections are shared within a round.
            async with self._wire if isinstance(self._wire, AbstractAsyncContextManager) else nullcontext():
                await self._ask(asked)
            self._refusals, self._asked_pause_s = 0, 0.0
            return
        except BackendUnavailable as refused:
            error = refused
        except Exception as odd:  # noqa: BLE001  (an answer that cannot be read is none, and no reason to stop asking)
            error = BackendUnavailable(f"{type(odd).__name__}: {odd}")
        self._refusals, self._asked_pause_s = self._refusals + 1, error.retry_after_s or 0.0
        for run_id in asked:
            self._tell(run_id, None, error)

    def _take_turns(self, asked: list[str]) -> None:
        known, wanted = set(self._turns), set(asked)
        self._turns.rotate(-PROGRESS_A_ROUND)
        kept = [run_id for run_id in self._turns if run_id in wanted]
        self._turns = deque([*kept, *(run_id for run_id in asked if run_id not in known)])

    def _tell(self, run_id: str, status: RunStatus | None, error: BackendUnavailable | None = None) -> None:
        for future in self._forget(run_id):
            if future.done():
                continue
            if status is not None:
                future.set_result(status)
            elif error is not None:
                future.set_exception(error)

    def _forget(self, run_id: str) -> list[asyncio.Future[RunStatus]]:
        self._intervals_s.pop(run_id, None)
        return self._waiting.pop(run_id, [])

    async def _ask(self, asked: set[str]) -> None:
        """Tells of each run as soon as it is known, and takes it out of ``asked``."""
        if len(asked) > 1 and self._skipped >= self._rounds_without_list:
            await self._list(asked)
        else:
            self._skipped += 1
        await self._get(asked)

    async def _list(self, asked: set[str]) -> None:
        """Looks through the active runs, as long as that takes at most half as many requests as runs."""
        page_token: str | None = None
        for _ in range(max(1, len(asked) // 2)):
            with patience():
                answer = await self._wire.aget(*active_runs(page_token))
            for run in answer.get("runs") or ():
                run_id = str(run.get("run_id"))
                if run_id in asked:
                    asked.discard(run_id)
                    self._tell(run_id, status_of(run))
            page_token = answer.get("next_page_token")
            if not asked or not page_token:
                self._rounds_without_list = self._skipped = 0
                return
        # Too many runs of others: not again for a while, and for longer each time.
        self._rounds_without_list = min(MOST_ROUNDS_WITHOUT_LIST, max(1, 2 * self._rounds_without_list))
        self._skipped = 0

    async def _get(self, asked: set[str]) -> None:
        gate = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def one(run_id: str) -> None:
            async with gate:
                status = await status_in_loop(self._wire, run_id)
            asked.discard(run_id)
            self._tell(run_id, status)

        results = await asyncio.gather(*map(one, sorted(asked)), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result


def _done(future: asyncio.Future[RunStatus]) -> bool:
    return future.done()


_POLLERS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, WorkspacePoller]] = WeakKeyDictionary()


def shared_poller(databricks_conn_id: str) -> WorkspacePoller:
    """The poller of a connection in the running event loop. Nothing of one loop may be used in another."""
    pollers = _POLLERS.setdefault(asyncio.get_running_loop(), {})
    if databricks_conn_id not in pollers:
        from deepspeed_provider.hooks.databricks import DatabricksWorkspaceHook

        pollers[databricks_conn_id] = WorkspacePoller(DatabricksWorkspaceHook(databricks_conn_id, attempts=1))
    return pollers[databricks_conn_id]
