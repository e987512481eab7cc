# SPDX-License-Identifier: Apache-2.0
"""What Airflow does after a failed try, by the kind of the failure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import RetryDecision, RetryPolicy

from deepspeed_provider.backends.base import BackendUnavailable
from deepspeed_provider.errors import Failure, FailureKind, FineTuneError, SpecError
from deepspeed_provider.runs.job import RunFailed

if TYPE_CHECKING:
    from airflow.sdk import Context


@dataclass(frozen=True, kw_only=True)
class FineTuneRetryPolicy(RetryPolicy):
    """A retry for what may pass, at the pace of its cause; none for what would only fail again.

    The operators of this package fail at once for good by themselves, with and without a policy: it says when the next
    try comes, and does the same for tasks of your own that raise our errors. It never adds a try to ``retries``.
    Errors that it does not know are left to the task's own settings.

    :param capacity_delay: before asking again for machines that the cloud or the workspace did not have.
    :param transient_delay: after a lost machine, a cluster that ended, a service that did not answer.
    """

    capacity_delay: timedelta = timedelta(minutes=10)
    transient_delay: timedelta = timedelta(minutes=1)

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,  # noqa: ARG002
        max_tries: int,  # noqa: ARG002
        context: Context | None = None,  # noqa: ARG002
    ) -> RetryDecision:
        for error in _causes(exception):
            if isinstance(error, RunFailed):
                return self._decide(error.failure, error.retryable)
            if isinstance(error, FineTuneError):
                return self._decide(error.failure, error.failure.kind.retryable)
            if isinstance(error, SpecError):
                return RetryDecision.fail(str(error))
            if isinstance(error, BackendUnavailable):
                return RetryDecision.retry(self.transient_delay, f"the cluster does not answer: {error}")
        return RetryDecision.default()

    def _decide(self, failure: Failure, retryable: bool) -> RetryDecision:
        reason = str(failure).partition("\n")[0]
        if not retryable:
            return RetryDecision.fail(reason)
        delays = {FailureKind.CAPACITY: self.capacity_delay, FailureKind.TRANSIENT: self.transient_delay}
        return RetryDecision.retry(delays.get(failure.kind), reason)

    def serialize(self) -> dict[str, Any]:
        return {name: delay.total_seconds() for name, delay in asdict(self).items()}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> FineTuneRetryPolicy:
        return cls(**{name: timedelta(seconds=seconds) for name, seconds in data.items()})


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from; an error may be a cause of itself."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__
