# SPDX-License-Identifier: Apache-2.0
"""The few Spark Connect calls that a durable run needs, and nothing of a DataFrame.

The stock client releases responses as it reads them and hides operation ids; a run that outlives
its submitter needs neither. Everything here is stateless: session and operation ids are ours.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from deepspeed_provider.backends.base import BackendUnavailable
from deepspeed_provider.errors import Failure, FailureKind, FineTuneError

if TYPE_CHECKING:
    from pyspark.sql.connect.proto import ExecutePlanRequest

CLIENT_TYPE = "airflow-provider-deepspeed"

# Answers that say nothing about the run, only that the server cannot be asked right now.
UNAVAILABLE_CODES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED"})

# Of nobody's session: asking for it opens none.
NOBODY = "00000000-0000-4000-8000-000000000000"


@dataclass(frozen=True, slots=True, kw_only=True)
class WireProblem:
    """A refusal or failure as the server tells it: gRPC code, Spark error class, message.

    ``error_id`` is the key of the whole message on the server; the one here is cut short.
    """

    code: str
    error_class: str
    message: str
    error_id: str = ""


class WireError(Exception):
    """The server answered, and the answer is an error."""

    def __init__(self, problem: WireProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem

    def says(self, *error_classes: str) -> bool:
        """Whether the error is one of these Spark error classes (``INVALID_HANDLE.X`` or ``X``)."""
        return any(
            self.problem.error_class.endswith(name)
            or f"[{name}]" in self.problem.message
            or f".{name}]" in self.problem.message
            for name in error_classes
        )


class ConnectWire:
    """Raw calls to one Spark Connect server under one user id. Close it, or use it in ``with``.

    Every method raises ``BackendUnavailable`` when the server does not answer in time and
    ``WireError`` when it answers with an error.
    """

    def __init__(self, url: str, user_id: str, timeout_seconds: float = 20.0) -> None:
        from pyspark.sql.connect.client.core import DefaultChannelBuilder
        from pyspark.sql.connect.proto import base_pb2, base_pb2_grpc

        self._proto = base_pb2
        self._builder = DefaultChannelBuilder(url)
        self._channel = self._builder.toChannel()
        self._stub: Any = base_pb2_grpc.SparkConnectServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._user_id = user_id
        self._timeout_seconds = timeout_seconds

    def __enter__(self) -> ConnectWire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def greet(self, timeout_seconds: float) -> None:
        """Returns when a server answers that has every call we need; else raises. Leaves no session behind."""
        # Any refusal is an answer: of somebody who is not let in, the next call says why.
        with contextlib.suppress(WireError):
            self.status(NOBODY, NOBODY, timeout_seconds=timeout_seconds)

    def healthy(self, timeout_seconds: float) -> bool:
        """Whether a server that we can use answers. Leaves no session behind."""
        try:
            self.greet(timeout_seconds)
        except (BackendUnavailable, FineTuneError):
            return False
        return True

    def status(self, session_id: str, operation_id: str, timeout_seconds: float | None = None) -> str | None:
        """State of an operation without its ``OPERATION_STATE_`` prefix; None when it is not known.

        Raises FineTuneError when the server is older than Spark 4.2, or no Spark Connect server at all.
        """
        request = self._proto.GetStatusRequest(**self._who(session_id))
        request.operation_status.operation_ids.append(operation_id)
        try:
            with _translated():
                answer = self._stub.GetStatus(request, **self._call(timeout_seconds))
        except WireError as error:
            if error.says("SESSION_NOT_FOUND", "SESSION_CLOSED", "SESSION_CHANGED"):
                return None
            if error.problem.code == "UNIMPLEMENTED":
                raise self._too_old(error.problem.message) from error
            raise
        for status in answer.operation_statuses:
            if status.operation_id == operation_id:
                name = self._proto.GetStatusResponse.OperationStatus.OperationState.Name(status.state)
                return None if name.endswith("_UNKNOWN") else str(name).removeprefix("OPERATION_STATE_")
        return None

    def execute(self, request: ExecutePlanRequest) -> None:
        """Sends a plan and returns when the server holds it: at its first answer.

        ``request`` carries the session and operation ids; nothing is released, so that any other
        process can read every response later.
        """
        request.request_options.append(
            self._proto.ExecutePlanRequest.RequestOption(
                reattach_options=self._proto.ReattachOptions(reattachable=True)
            )
        )
        with _translated():
            stream = self._stub.ExecutePlan(request, **self._call(None))
            try:
                next(stream, None)
            finally:
                stream.cancel()

    def touch(self, session_id: str, operation_id: str, wait_seconds: float = 1.0) -> None:
        """A brief reattach. Only this resets the server's detached time-out; a status does not."""
        try:
            for _ in self._reattach(session_id, operation_id, wait_seconds):
                return
        except BackendUnavailable:
            # Nothing was sent within wait_seconds: a running operation has nothing to say yet.
            return

    def responses(self, session_id: str, operation_id: str, timeout_seconds: float | None = None) -> Iterator[bytes]:
        """Arrow IPC streams of the whole result, in order, from the first one on."""
        last = None
        while True:
            for response in self._reattach(session_id, operation_id, timeout_seconds or self._timeout_seconds, last):
                last = response.response_id
                if response.HasField("arrow_batch"):
                    yield response.arrow_batch.data
                if response.HasField("result_complete"):
                    return

    def whole_message(self, session_id: str, problem: WireProblem) -> str:
        """The uncut text of an error; the cut one when the server no longer has it."""
        if not problem.error_id:
            return problem.message
        request = self._proto.FetchErrorDetailsRequest(**self._who(session_id), error_id=problem.error_id)
        try:
            with _translated():
                answer = self._stub.FetchErrorDetails(request, **self._call(None))
        except (WireError, BackendUnavailable):
            return problem.message
        messages = [error.message for error in answer.errors]
        return "\n".join(messages) or problem.message

    def interrupt(self, session_id: str, operation_id: str) -> None:
        """Asks the server to cancel an operation; one that is not running is left as it is."""
        request = self._proto.InterruptRequest(
            **self._who(session_id),
            interrupt_type=self._proto.InterruptRequest.INTERRUPT_TYPE_OPERATION_ID,
            operation_id=operation_id,
        )
        try:
            with _translated():
                self._stub.Interrupt(request, **self._call(None))
        except WireError as error:
            if not error.says("SESSION_NOT_FOUND", "SESSION_CLOSED", "SESSION_CHANGED", "OPERATION_NOT_FOUND"):
                raise

    def release_session(self, session_id: str) -> None:
        """Lets the server forget a session and what it holds."""
        with _translated():
            self._stub.ReleaseSession(self._proto.ReleaseSessionRequest(**self._who(session_id)), **self._call(None))

    def _too_old(self, answer: str) -> FineTuneError:
        """The failure of a server without GetStatus, with its version where it tells one."""
        version = self._version()
        if version:
            found = f"the server runs Spark {version}, which lacks the call GetStatus"
        else:
            found = f"what answers there is older than Spark 4.2, or no Spark Connect server ({answer})"
        return FineTuneError(
            Failure(
                kind=FailureKind.USER,
                message=f"{found}: only Spark Connect of Spark 4.2 or later tells how a run goes that its submitter "
                "has left. Upgrade the server, or use the embedded engine or a Databricks workspace",
                evidence="Spark Connect server's answer",
            )
        )

    def _version(self) -> str:
        """Of the server's Spark; empty where it does not tell. Opens a session, and releases it."""
        session_id = str(uuid.uuid4())
        request = self._proto.AnalyzePlanRequest(
            **self._who(session_id), spark_version=self._proto.AnalyzePlanRequest.SparkVersion()
        )
        try:
            with _translated():
                version = self._stub.AnalyzePlan(request, **self._call(None)).spark_version.version
        except WireError:
            return ""
        with contextlib.suppress(WireError, BackendUnavailable):
            self.release_session(session_id)
        return str(version)

    def _reattach(
        self, session_id: str, operation_id: str, timeout_seconds: float, last_response_id: str | None = None
    ) -> Iterator[Any]:
        request = self._proto.ReattachExecuteRequest(
            **self._who(session_id), operation_id=operation_id, last_response_id=last_response_id
        )
        with _translated():
            stream = self._stub.ReattachExecute(request, **self._call(timeout_seconds))
            try:
                yield from stream
            finally:
                stream.cancel()

    def _who(self, session_id: str) -> dict[str, Any]:
        return {
            "session_id": session_id,
            "user_context": self._proto.UserContext(user_id=self._user_id),
            "client_type": CLIENT_TYPE,
        }

    def _call(self, timeout_seconds: float | None) -> dict[str, Any]:
        return {"metadata": self._builder.metadata(), "timeout": timeout_seconds or self._timeout_seconds}


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turns gRPC errors into ours."""
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        problem = _problem(error)
        if problem.code in UNAVAILABLE_CODES:
            raise BackendUnavailable(
                f"the Spark Connect server does not answer: {problem.code}: {problem.message}"
            ) from error
        raise WireError(problem) from error


def _problem(error: Any) -> WireProblem:
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    error_class, error_id = "", ""
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            error_class = info.metadata.get("errorClass", "")
            error_id = info.metadata.get("errorId", "")
    return WireProblem(
        code=error.code().name, error_class=error_class, message=error.details() or "", error_id=error_id
    )
