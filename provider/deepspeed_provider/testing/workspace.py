# SPDX-License-Identifier: Apache-2.0
"""A Databricks workspace that runs in this process: the real one's API over loopback, scripted, in virtual time.

Nothing trains here. What a run does is scripted; whoever talks to it talks HTTP, as with the real one.
"""

from __future__ import annotations

import html
import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from deepspeed_provider.testing.answers import text, whole
from deepspeed_provider.testing.clock import VirtualClock
from deepspeed_provider.testing.endings import Ending, succeeds
from deepspeed_provider.testing.faults import EVERYTHING, Fault, Faults
from deepspeed_provider.testing.files import Files
from deepspeed_provider.testing.jobs import Jobs
from deepspeed_provider.testing.offers import node_types_of, spark_versions
from deepspeed_provider.testing.played_training import play
from deepspeed_provider.testing.run_json import Run
from deepspeed_provider.testing.secret_scopes import SecretScopes
from deepspeed_provider.testing.server import HOST, Handler, Request, Server
from deepspeed_provider.testing.submissions import Offers
from deepspeed_provider.testing.timeline import Attempt, Behaviour

USER: Final = "someone@example.com"
ME: Final = {"id": "1", "userName": USER, "displayName": "Someone", "active": True}
TOKEN: Final = "dapi-fake"


class FakeWorkspace:
    """A workspace to test DAGs against.

    Use it as a context manager, or call :meth:`start` and :meth:`stop`. What the next runs do is told with
    :meth:`next_run`; without a word a run succeeds.

    Args:
        cloud: whose node types it has: ``aws``, ``azure`` or ``gcp``.
        poll_s: virtual seconds that pass whenever a client asks about runs.
        speed: virtual seconds a real second.
        faults: what goes wrong on the way; those planned with :meth:`fault` where none are given.
        ended: told once of each attempt whose code has ended, by the first request that finds it so, before its answer:
            with the run, the task's key and the attempt. Write here, into ``files``, what the code would have written.
            Without it trainings of this provider leave what they leave on a real cluster.

    Attributes:
        clock: its time. faults: what goes wrong on the way. files: Volumes and workspace files.
        secrets: the secret scopes. jobs: the runs.
        tokens: the bearer tokens that are let in.
        node_types, spark_versions: what it offers, as the API lists it; change them at will.
        clusters: ids of clusters that are there already.
    """

    def __init__(
        self,
        *,
        cloud: str = "aws",
        poll_s: float = 0.0,
        speed: float = 0.0,
        ended: Callable[[Run, str, Attempt], None] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.clock = VirtualClock(poll_s=poll_s, speed=speed)
        self.faults = faults or Faults()
        self.files = Files(self.clock, user=USER)
        self.secrets = SecretScopes(self.clock)
        self.tokens = {TOKEN}
        self.node_types = node_types_of(cloud)
        self.spark_versions = spark_versions()
        self.clusters: set[str] = set()
        self.default_behaviour = behaviour()
        self._scripted: deque[Behaviour] = deque()
        self.jobs = Jobs(
            clock=self.clock,
            url=lambda: self.url,
            creator=USER,
            behaviour=lambda: self._scripted.popleft() if self._scripted else self.default_behaviour,
            offers=self._offers,
            ended=ended or (lambda *attempt: play(self.files, *attempt)),
        )
        self._server = Server(
            self._routes(), accepts=lambda token: token in self.tokens, faults=self.faults, page=self._page
        )

    def start(self, port: int = 0) -> FakeWorkspace:
        """Serves at :attr:`url`; with port 0 at a free one. Raises OSError when the port is taken."""
        self._server.start(port)
        return self

    def stop(self) -> None:
        self._server.stop()

    def __enter__(self) -> FakeWorkspace:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def connection(self) -> dict[str, Any]:
        """An Airflow connection to it, as ``AIRFLOW_CONN_…`` takes it in JSON.

        The Databricks provider keeps of ``host`` only the name, so scheme and port are fields of their own.
        """
        token = next(iter(self.tokens), TOKEN)
        return {"conn_type": "databricks", "host": HOST, "schema": "http", "port": self.port, "password": token}

    @property
    def connection_json(self) -> str:
        return json.dumps(self.connection)

    @property
    def requests(self) -> list[Request]:
        """Everything that was asked, in order."""
        return self._server.requests

    def requests_for(self, path: str) -> list[Request]:
        """Those for one path, such as ``jobs/runs/submit``."""
        return [request for request in self.requests if request.path == path]

    @property
    def runs(self) -> list[Run]:
        """All runs, in the order in which they were submitted."""
        return list(self.jobs.runs.values())

    def next_run(self, *endings: Ending, **course: Any) -> None:
        """Scripts the next run that nothing is scripted for yet.

        Args:
            endings: of its task's attempts; the last one is that of all after it. None means success.
            course: further fields of ``Behaviour``: ``queue_s``, ``start_s``, ``run_s``, ``stop_s``, ``running_as``,
                and ``of_task`` with endings by task key.
        """
        self._scripted.append(behaviour(*endings, **course))

    def fault(
        self, fault: Fault, *, path: str = EVERYTHING, method: str = EVERYTHING, times: int = 1, skip: int = 0
    ) -> None:
        """Lets the next ``times`` requests that match go wrong, after ``skip`` that don't."""
        self.faults.plan(fault, path=path, method=method, times=times, skip=skip)

    def advance(self, seconds: float) -> None:
        """Lets virtual time pass."""
        self.clock.advance(seconds)

    def _offers(self) -> Offers:
        return Offers(
            node_types=frozenset(entry["node_type_id"] for entry in self.node_types),
            spark_versions=frozenset(entry["key"] for entry in self.spark_versions),
            clusters=frozenset(self.clusters),
        )

    def _page(self, _: str) -> str:
        """What a person sees who follows the link to a run."""
        rows = "".join(
            f"<tr><td id='job/run/{run.run_id}'>{run.run_id}</td><td>{html.escape(run.name)}</td>"
            f"<td>{run.course(self.clock.now_ms).phase}</td></tr>"
            for run in reversed(self.runs)
        )
        return f"<title>Fake workspace</title><h1>Runs</h1><table><tr><th>Run<th>Name<th>State</tr>{rows}</table>"

    def _routes(self) -> dict[tuple[str, str], Handler]:
        jobs, files, secrets = self.jobs, self.files, self.secrets
        return {
            ("POST", "jobs/runs/submit"): lambda asked: jobs.submit(asked.arguments),
            ("GET", "jobs/runs/get"): lambda asked: jobs.get(_id(asked), asked.arguments),
            ("GET", "jobs/runs/list"): lambda asked: jobs.listing(asked.arguments),
            ("GET", "jobs/runs/get-output"): lambda asked: jobs.output(_id(asked)),
            ("POST", "jobs/runs/cancel"): lambda asked: jobs.cancel(_id(asked)),
            ("POST", "jobs/runs/delete"): lambda asked: jobs.delete(_id(asked)),
            ("GET", "clusters/get"): lambda asked: jobs.cluster(text(asked.arguments, "cluster_id")),
            ("POST", "clusters/events"): lambda asked: jobs.cluster_events(asked.arguments),
            ("GET", "clusters/list-node-types"): lambda _: {"node_types": self.node_types},
            ("GET", "clusters/spark-versions"): lambda _: {"versions": self.spark_versions},
            ("POST", "workspace/import"): lambda asked: files.import_(asked.arguments),
            ("POST", "workspace/mkdirs"): lambda asked: files.make_workspace_folder(asked.arguments),
            ("POST", "workspace/delete"): lambda asked: files.delete(asked.arguments),
            ("GET", "workspace/get-status"): lambda asked: files.status(asked.arguments),
            ("GET", "workspace/export"): lambda asked: files.export(asked.arguments),
            ("GET", "workspace/list"): lambda asked: files.list_workspace(asked.arguments),
            ("PUT", "fs/files/*"): lambda asked: files.upload(_path(asked), asked.data, asked.arguments),
            ("GET", "fs/files/*"): lambda asked: files.download(_path(asked)),
            ("HEAD", "fs/files/*"): lambda asked: files.download(_path(asked)),
            ("DELETE", "fs/files/*"): lambda asked: files.remove(_path(asked)),
            ("PUT", "fs/directories/*"): lambda asked: files.make_folder(_path(asked)),
            ("GET", "fs/directories/*"): lambda asked: files.listing(_path(asked), asked.arguments),
            ("HEAD", "fs/directories/*"): lambda asked: files.require_folder(_path(asked)),
            ("DELETE", "fs/directories/*"): lambda asked: files.remove_folder(_path(asked)),
            ("POST", "secrets/scopes/create"): lambda asked: secrets.create(asked.arguments),
            ("GET", "secrets/scopes/list"): lambda asked: secrets.list_scopes(asked.arguments),
            ("POST", "secrets/scopes/delete"): lambda asked: secrets.delete_scope(asked.arguments),
            ("POST", "secrets/put"): lambda asked: secrets.put(asked.arguments),
            ("GET", "secrets/list"): lambda asked: secrets.list(asked.arguments),
            ("GET", "secrets/get"): lambda asked: secrets.get(asked.arguments),
            ("POST", "secrets/delete"): lambda asked: secrets.delete(asked.arguments),
            ("GET", "preview/scim/v2/Me"): lambda _: ME,
        }


def behaviour(
    *endings: Ending, of_task: Mapping[str, Ending | tuple[Ending, ...]] | None = None, **course: Any
) -> Behaviour:
    """A behaviour with these endings; without one the run succeeds."""
    named = {key: each if isinstance(each, tuple) else (each,) for key, each in (of_task or {}).items()}
    return Behaviour(endings=endings or (succeeds(),), of_task=named, **course)


def _id(asked: Request) -> int:
    return whole(asked.arguments, "run_id")


def _path(asked: Request) -> str:
    """Of a file: what follows ``fs/files`` or ``fs/directories``."""
    return "/" + asked.path.split("/", 2)[2]
