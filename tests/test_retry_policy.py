# SPDX-License-Identifier: Apache-2.0
"""When the next try comes, and whether one does: by the kind of the failure, whoever raises it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from airflow.sdk import RetryAction
from airflow.sdk.exceptions import AirflowException
from deepspeed_provider.backends.base import BackendUnavailable
from deepspeed_provider.errors import Failure, FailureKind, FineTuneError, SpecError
from deepspeed_provider.retry_policy import FineTuneRetryPolicy

POLICY = FineTuneRetryPolicy(capacity_delay=timedelta(minutes=7), transient_delay=timedelta(seconds=20))
KINDS = {
    FailureKind.USER: (RetryAction.FAIL, None),
    FailureKind.GPU_OOM: (RetryAction.FAIL, None),
    FailureKind.HOST_OOM: (RetryAction.FAIL, None),
    FailureKind.CANCELLED: (RetryAction.FAIL, None),
    FailureKind.CAPACITY: (RetryAction.RETRY, timedelta(minutes=7)),
    FailureKind.TRANSIENT: (RetryAction.RETRY, timedelta(seconds=20)),
    FailureKind.UNKNOWN: (RetryAction.RETRY, None),
}


def failed(kind: FailureKind) -> FineTuneError:
    return FineTuneError(Failure(kind=kind, message="it broke", evidence="test", detail="a trace\nof many lines"))


@pytest.mark.parametrize("kind", FailureKind)
def test_the_kind_decides(kind: FailureKind) -> None:
    decision = POLICY.evaluate(failed(kind), try_number=1, max_tries=3)
    assert (decision.action, decision.retry_delay) == KINDS[kind]
    assert decision.reason == f"{kind}: it broke (from the test)"


def test_a_cause_is_found_below_what_wraps_it() -> None:
    wrapped = AirflowException("the task failed")
    wrapped.__cause__ = RuntimeError("in between")
    wrapped.__cause__.__cause__ = failed(FailureKind.CAPACITY)
    assert POLICY.evaluate(wrapped, 1, 3).retry_delay == timedelta(minutes=7)


def test_a_wrong_request_fails_with_all_its_problems() -> None:
    decision = POLICY.evaluate(SpecError.of("ranks", 0, "is no positive number", "Give 1."), 1, 3)
    assert decision.action is RetryAction.FAIL
    assert "ranks = 0: is no positive number. Give 1." in str(decision.reason)


def test_a_silent_cluster_is_asked_again_soon() -> None:
    decision = POLICY.evaluate(BackendUnavailable("connection refused"), 1, 3)
    assert (decision.action, decision.retry_delay) == (RetryAction.RETRY, timedelta(seconds=20))


def test_other_errors_are_left_to_the_task() -> None:
    circular = ValueError("no rows")
    circular.__cause__ = KeyError("x")
    circular.__cause__.__cause__ = circular
    for error in (circular, OSError("disk"), AirflowException("no cause")):
        assert POLICY.evaluate(error, 1, 3).action is RetryAction.DEFAULT


def test_it_survives_its_wire() -> None:
    assert FineTuneRetryPolicy.deserialize(POLICY.serialize()) == POLICY
