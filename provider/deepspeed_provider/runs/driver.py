# SPDX-License-Identifier: Apache-2.0
"""Carries one durable run from nothing to a judgement: mint, submit, attach, judge, close.

The same driver serves blocking and deferrable tasks, in any process; only the record store is shared.
The order of its steps is the promise "exactly once": the identity is stored before anything is
submitted, and submission is idempotent under it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deepspeed_provider.backends.base import Backend, BackendUnavailable, RunIdentity, RunState, RunStatus
from deepspeed_provider.errors import Failure, FailureKind, FineTuneError, SpecError
from deepspeed_provider.runs import evidence
from deepspeed_provider.runs.job import Finished, Job, RecordStore, RunFailed, StillRunning, Tracker, Waiting
from deepspeed_provider.runs.record import Opening, Outcome, Phase, RunRecord, Verdict, opening, verdict

MAX_ODD_ANSWERS = 5


class RunDriver:
    """The effects of the state machine in ``record``.

    Args:
        connect: a backend; called again after the cluster was unreachable, as a restarted engine has
            another address and a rotated token another value.
        checkpoint: called with the record before each action; may raise to end here, as for a process
            that was told to end. Afterwards nothing is minted, submitted or judged.
        stop_bound_s: how long a cancelled run may take to stop before that is an error.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], Backend],
        store: RecordStore,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        log: logging.Logger | Any,
        checkpoint: Callable[[RunRecord | None], None] = lambda _: None,
        stop_bound_s: float = 120.0,
        stop_poll_s: float = 2.0,
    ) -> None:
        self._connect = connect
        self._store = store
        self._clock = clock
        self._sleep = sleep
        self._log = log
        self._checkpoint = checkpoint
        self._stop_bound_s = stop_bound_s
        self._stop_poll_s = stop_poll_s
        self._connected: Backend | None = None
        self._unsent: str | None = None
        self._asked_by_token: str | None = None
        self._seen_alive = False
        self._odd_answers = 0

    @property
    def backend(self) -> Backend:
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    def open(self, job: Job, *, new_execution: bool = True) -> RunRecord:
        """The record that this execution works on. Nothing is submitted yet.

        Args:
            new_execution: a try of its own, with its own count of replacements; False goes on with one
                that was deferred.

        Raises:
            RunFailed: it was judged one for good, and nobody has been told.
        """
        # A run that was cancelled before this execution began was cancelled by what the execution follows.
        self._seen_alive = not new_execution
        record = self._store.load()
        first = opening(record, max_tries=job.max_tries, on_clear=job.on_clear)
        if record is None or first is Opening.MINT:
            return self._mint(job, record)
        if first is Opening.REPORT and record.failure is not None:
            raise RunFailed(record.failure, record)
        if first is Opening.RESTART:
            self._log.info("Cleared with on_clear='restart': stopping run %s first.", _name(record))
            self.stop(record)
            return self._mint(job, self._close(job.tracker, record, Outcome.CANCELLED))
        cleared = job.max_tries > record.max_tries
        taken_up = replace(
            record,
            max_tries=job.max_tries,
            replacements=0 if new_execution else record.replacements,
            # A person who clears the task wants the run to go on, with a time budget of its own.
            deadline_s=self._deadline(job) if cleared else record.deadline_s,
        )
        if taken_up != record:
            record = taken_up
            self._store.save(record)
        self._log.info("Found run %s (%s); attaching to it.", _name(record), record.phase)
        if job.build("", None).digest != record.digest:
            self._log.warning("The request has changed since the run was minted; the stored run wins.")
        return record

    def step(self, job: Job, record: RunRecord) -> Waiting | Finished:
        """Takes the run as far as it goes now.

        Raises:
            RunFailed: it was judged a failure.
            StillRunning: it was cancelled at its deadline and does not stop.
        """
        while True:
            try:
                done = self._step(job, record)
            except BackendUnavailable as error:
                self._connected = None
                record = self._store.load() or record
                if record.overdue(self._clock()):
                    # Not closed: it may be alive, and whoever takes it up next must stop it first.
                    raise RunFailed(_unreachable(error), record) from error
                self._log.warning("The cluster does not answer (%s); asking again until the deadline.", error)
                return Waiting(record=record, detail=f"cluster unreachable: {error}")
            if not isinstance(done, RunRecord):
                return done
            record = done

    def stop(self, record: RunRecord) -> RunState:
        """Cancels the run and watches it stop; the state it ended in.

        Raises:
            StillRunning: not within the bound.
        """
        end_s = self._clock() + self._stop_bound_s
        asked = False
        while True:
            try:
                if not asked:
                    self.backend.cancel(record.handle)
                    asked = True
                state = self.backend.poll(record.handle).state
                if state.terminal or state is RunState.UNSEEN:
                    return state
            except BackendUnavailable as error:
                self._connected = None
                self._log.warning("The cluster does not answer while run %s is stopped: %s", _name(record), error)
            if self._clock() >= end_s:
                raise StillRunning(
                    f"run {_name(record)} was {'cancelled' if asked else 'to be cancelled'} but did not stop within "
                    f"{self._stop_bound_s:g} s. Check on the cluster that it ends; its files are in "
                    f"{record.handle.output_uri}"
                )
            self._sleep(self._stop_poll_s)

    def abandon(self, tracker: Tracker, record: RunRecord) -> None:
        """Stops a run that nobody will wait for any more, and closes it."""
        self.stop(record)
        self._close(tracker, record, Outcome.CANCELLED)

    def _mint(self, job: Job, before: RunRecord | None, *, replacement: bool = False) -> RunRecord:
        self._checkpoint(before)
        identity = RunIdentity(
            key=job.key,
            generation=before.generation + 1 if before else 1,
            digest=job.build("", None).digest,
        )
        run_id, url = job.tracker.start(identity)
        record = RunRecord(
            key=job.key,
            generation=identity.generation,
            digest=identity.digest,
            handle=self.backend.mint(job.build(identity.token, run_id), identity),
            mlflow_run_id=run_id,
            mlflow_url=url,
            deadline_s=before.deadline_s if before and replacement else self._deadline(job),
            max_tries=job.max_tries,
            replacements=before.replacements + 1 if before and replacement else 0,
        )
        self._store.save(record)
        self._unsent = record.handle.token
        self._log.info("Minted run %s.", _name(record))
        return record

    def _deadline(self, job: Job) -> float | None:
        return None if job.timeout_s is None else self._clock() + job.timeout_s

    def _poll(self, record: RunRecord) -> RunStatus:
        """The state; an odd answer counts as none until it repeats, as after a rotated token or a proxy's page."""
        backend = self.backend
        try:
            status = backend.poll(record.handle)
        except BackendUnavailable:
            raise
        except Exception as error:
            self._odd_answers += 1
            if self._odd_answers >= MAX_ODD_ANSWERS:
                raise
            raise BackendUnavailable(f"{type(error).__name__}: {error}") from error
        self._odd_answers = 0
        return status

    def _step(self, job: Job, record: RunRecord) -> Waiting | Finished | RunRecord:
        self._checkpoint(record)
        if self._unsent == record.handle.token:
            return self._submit(job, record)
        status = self._poll(record)
        arrived = status.state not in (RunState.LOST, RunState.UNSEEN)
        self._seen_alive |= status.state in (RunState.PENDING, RunState.RUNNING)
        if status.state is RunState.TERMINATING and not self._seen_alive and not record.found_ending:
            record = replace(record, found_ending=True)
            self._store.save(record)
        if arrived and (record.phase is Phase.MINTED or status.ids):
            # It had arrived, though its submitter did not live to note it.
            record = replace(record.submitted(), handle=record.handle.with_ids(**status.ids))
            self._store.save(record)
        stored, started = self._look(record, status.state)
        action = verdict(
            record,
            status.state,
            now_s=self._clock(),
            has_stored_result=stored is not None,
            has_started=started,
            by_person=status.by_person and self._seen_alive and not record.found_ending,
        )
        self._checkpoint(record)
        if action is Verdict.WAIT:
            return Waiting(record=record, detail=status.detail or status.state)
        return self._act(action, job, record, status, stored)

    def _act(
        self, action: Verdict, job: Job, record: RunRecord, status: RunStatus, stored: dict[str, Any] | None
    ) -> Waiting | Finished | RunRecord:
        if action is Verdict.SUBMIT:
            return self._submit(job, record)
        if action is Verdict.COLLECT:
            return self._collect(job, record, status, stored)
        if action is Verdict.STOP:
            self._log.warning("Run %s is past its deadline: cancelling it.", _name(record))
            self.stop(record)
            return record  # The next look judges how it ended: it may have finished after all.
        if action is Verdict.REPLACE:
            return self._replace(job, record, status)
        if action is Verdict.DIAGNOSE:
            return self._diagnose(job, record, status)
        if action is Verdict.ACCEPT:
            raise self._fail(job, record, _cancelled(status), Outcome.CANCELLED)
        if action is Verdict.OVERDUE:
            raise self._fail(job, record, _overdue(), Outcome.OVERDUE)
        raise self._fail(job, record, _given_up(record, status), Outcome.FAILED)

    def _submit(self, job: Job, record: RunRecord) -> RunRecord:
        self._log.info("Submitting run %s.", _name(record))
        sent_before, self._unsent = self._unsent != record.handle.token, None
        if self._asked_by_token == record.handle.token:
            raise BackendUnavailable("the cluster takes the run for one that it has, and does not show it")
        try:
            handle = self.backend.submit(job.build(record.handle.token, record.mlflow_run_id), record.handle)
        except SpecError:
            # Refused before anything was sent: there is nothing to stop, unless it was sent before.
            if not sent_before:
                self._close(job.tracker, record, Outcome.FAILED)
            raise
        except FineTuneError as error:
            # What was sent before without an answer may have arrived, whatever is said now.
            if sent_before and self._is_alive(record):
                self._log.warning("Run %s is there, though it is refused now: %s", _name(record), error)
                return record
            if sent_before and error.failure.kind is FailureKind.TRANSIENT:
                # Not closed: what has arrived may have ended meanwhile, and the next try finds it by its token.
                raise RunFailed(error.failure, record) from error
            raise self._fail(job, record, error.failure, Outcome.FAILED) from error
        self._asked_by_token = record.handle.token if record.phase is Phase.SUBMITTED else None
        record = replace(record.submitted(), handle=handle)
        self._store.save(record)
        return record

    def _is_alive(self, record: RunRecord) -> bool:
        state = self._poll(record).state
        return not state.terminal and state is not RunState.UNSEEN

    def _look(self, record: RunRecord, state: RunState) -> tuple[dict[str, Any] | None, bool]:
        """(stored result, has a rank started) of a run that ended without a success."""
        if not state.terminal or state is RunState.SUCCEEDED:
            return None, False
        files = self.backend.read_texts(f"{record.handle.output_uri}/result.json")
        stored = evidence.read_result(files.values(), record.handle.token)
        if stored is not None or state is not RunState.LOST:
            return stored, True
        return None, bool(self.backend.read_texts(f"{record.handle.output_uri}/started-rank*.json"))

    def _collect(
        self, job: Job, record: RunRecord, status: RunStatus, stored: dict[str, Any] | None
    ) -> Finished | RunRecord:
        if stored is not None:
            self._log.warning("The cluster says %s, but the run's result is stored: it succeeded.", status.state)
            return Finished(record=self._close(job.tracker, record, Outcome.SUCCEEDED), result=stored)
        try:
            result = self.backend.result(record.handle)
        except FineTuneError as error:
            files = self.backend.read_texts(f"{record.handle.output_uri}/result.json")
            result = evidence.read_result(files.values(), record.handle.token)
            if result is None:
                raise self._fail(job, record, error.failure, Outcome.FAILED) from error
        return Finished(record=self._close(job.tracker, record, Outcome.SUCCEEDED), result=result)

    def _diagnose(self, job: Job, record: RunRecord, status: RunStatus) -> RunRecord:
        failure = evidence.cause(self.backend.read_texts(f"{record.handle.output_uri}/failure-rank*.json"))
        if failure is None:
            failure = self._failure_of_operation(record, status)
        if failure.kind is FailureKind.CANCELLED and not record.overdue(self._clock()):
            return self._replace(job, record, status)
        raise self._fail(job, record, failure, Outcome.FAILED)

    def _failure_of_operation(self, record: RunRecord, status: RunStatus) -> Failure:
        try:
            self.backend.result(record.handle)
        except FineTuneError as error:
            return error.failure
        return Failure(
            kind=FailureKind.UNKNOWN,
            message=f"the cluster says {status.detail or status.state}, without a cause",
            evidence="operation status",
        )

    def _replace(self, job: Job, record: RunRecord, status: RunStatus) -> RunRecord:
        if verdict(record, RunState.CANCELLED, now_s=self._clock()) is not Verdict.REPLACE:
            raise self._fail(job, record, _given_up(record, status), Outcome.FAILED)
        self._log.warning(
            "Run %s was ended by the platform (%s) without a result; replacing it by generation %d.",
            _name(record),
            status.detail or status.state,
            record.generation + 1,
        )
        if record.mlflow_run_id:
            job.tracker.end(record.mlflow_run_id, Outcome.CANCELLED)
        return self._mint(job, record, replacement=True)

    def _close(
        self, tracker: Tracker, record: RunRecord, outcome: Outcome, failure: Failure | None = None
    ) -> RunRecord:
        record = record.closed(outcome, failure)
        self._store.save(record)
        if record.mlflow_run_id:
            tracker.end(record.mlflow_run_id, outcome)
        return record

    def _fail(self, job: Job, record: RunRecord, failure: Failure, outcome: Outcome) -> RunFailed:
        return RunFailed(failure, self._close(job.tracker, record, outcome, failure))


def _name(record: RunRecord) -> str:
    return f"{record.handle.token[:12]} (generation {record.generation})"


def _unreachable(error: BackendUnavailable) -> Failure:
    return Failure(
        kind=FailureKind.TRANSIENT,
        message=f"the deadline has passed and the cluster does not answer ({error}); the run may still be alive there",
        evidence="deadline",
    )


def _overdue() -> Failure:
    return Failure(
        kind=FailureKind.CANCELLED,
        message="the deadline has passed; the run was cancelled and has stopped",
        evidence="deadline",
    )


def _cancelled(status: RunStatus) -> Failure:
    return Failure(
        kind=FailureKind.CANCELLED,
        message=f"somebody cancelled the run on the cluster ({status.detail or status.state})",
        evidence="run state",
    )


def _given_up(record: RunRecord, status: RunStatus) -> Failure:
    return Failure(
        kind=FailureKind.TRANSIENT,
        message=f"the platform ended the run without a result ({status.detail or status.state}), "
        f"after {record.replacements} replacements",
        evidence="operation status",
    )
