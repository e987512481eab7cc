# SPDX-License-Identifier: Apache-2.0
"""From what Databricks keeps of a failed run to its cause. Pure.

What the ranks wrote comes first, then the platform's codes, then patterns in the output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from deepspeed_provider.backends.jobs_states import (
    CAPACITY_REASONS,
    HOST_MEMORY_REASONS,
    TERMINATIONS,
    UNKNOWN_TERMINATION,
    termination,
)
from deepspeed_provider.backends.rank_failures import cause, last_lines
from deepspeed_provider.errors import Failure, FailureKind
from deepspeed_provider.training.driver_side import FAILURE_MARK

TOLD_EVENTS: Final = ("ADD_NODES_FAILED", "NODES_LOST", "DRIVER_NOT_RESPONDING", "UC_VOLUME_MISCONFIGURED")

# (pattern, kind); the first that matches wins. Memory that is full says so anywhere in the output, before echoes of a
# rank that is gone.
MEMORY_PATTERNS: Final = (
    (re.compile(r"java\.lang\.OutOfMemoryError|GC overhead limit exceeded"), FailureKind.HOST_OOM),
    (
        re.compile(r"\bOutOfMemoryError|CUDA (?:error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
        FailureKind.GPU_OOM,
    ),
    (
        re.compile(r"return code = -9\b|exitcode\s*:\s*-9\b|oom-kill|Cannot allocate memory|\bMemoryError\b"),
        FailureKind.HOST_OOM,
    ),
)
# Of the exception that ended the run alone: the output also tells of what somebody has caught, and NCCL's own chatter.
CAUSE_PATTERNS: Final = (
    (re.compile(r"ModuleNotFoundError|ImportError|InputError|DeepSpeedConfigError"), FailureKind.USER),
    (
        re.compile(r"NCCL|ProcessGroup|Watchdog caught collective|Connection (?:reset|refused)|EADDRINUSE"),
        FailureKind.TRANSIENT,
    ),
)
# A line that begins with an exception's name, be it a rank's.
EXCEPTION_LINE: Final = re.compile(
    r"^(?:\[[^\]\n]*\]:?[ \t]*)?((?:\w+\.)*\w+(?:Error|Exception|Interrupt)(?::[^\n]*)?)$", re.M
)
# What the driver says when ranks have failed: their own exceptions are in the logs.
WRAPPERS: Final = ("RuntimeError", "CalledProcessError", "ChildFailedError", "SystemExit")


@dataclass(frozen=True, kw_only=True)
class TaskEvidence:
    """What there is about one task's last attempt.

    Attributes:
        task: its entry in ``runs/get``.
        output: of ``runs/get-output``; empty where there is none.
        cluster: of ``clusters/get``. events: of ``clusters/events``, any order.
    """

    task: Mapping[str, Any]
    output: Mapping[str, Any] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()


def failure_of(run: Mapping[str, Any], tasks: Sequence[TaskEvidence]) -> Failure:
    """The cause of a run that failed; ``tasks``: the earliest end first."""
    told = [record for each in tasks for record in marked(str(each.output.get("logs") or ""), FAILURE_MARK)]
    if (found := cause(told)) is not None:
        return found
    failed = next((each for each in tasks if termination(each.task)[0] != "SUCCESS"), None)
    code, message = termination(run if failed is None else failed.task)
    known = TERMINATIONS.get(code, UNKNOWN_TERMINATION)
    kind, evidence, text = known.kind, f"termination code {code}", message or known.meaning
    reason = _cluster_reason(failed)
    if reason in CAPACITY_REASONS:
        kind, evidence = FailureKind.CAPACITY, f"cluster's end, {reason}"
    elif reason in HOST_MEMORY_REASONS:
        kind, evidence = FailureKind.HOST_OOM, f"cluster's end, {reason}"
    if failed is not None and code == "RUN_EXECUTION_ERROR":
        text = str(failed.output.get("error") or text)
        kind, evidence = _by_pattern(failed.output) or (kind, "task's output" if failed.output else evidence)
    return Failure(
        kind=kind,
        message=f"{known.meaning}: {_one_line(text)}",
        evidence=evidence,
        detail=_detail(run, failed, reason),
    )


def marked(logs: str, mark: str) -> list[dict[str, Any]]:
    """The JSON objects that the driver side printed after ``mark``."""
    found = []
    for line in logs.splitlines():
        _, separator, text = line.partition(mark)
        if separator:
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
    return [each for each in found if isinstance(each, dict)]


def _by_pattern(output: Mapping[str, Any]) -> tuple[FailureKind, str] | None:
    error, trace, logs = (str(output.get(name) or "") for name in ("error", "error_trace", "logs"))
    causes = f"{error}\n{_last_exception(trace)}"
    if not error or _name(error) in WRAPPERS:
        causes += f"\n{_last_exception(logs)}"
    for patterns, text in ((MEMORY_PATTERNS, f"{error}\n{trace}\n{logs}"), (CAUSE_PATTERNS, causes)):
        for pattern, kind in patterns:
            if pattern.search(text):
                return kind, "task's output"
    return None


def _last_exception(text: str) -> str:
    found = EXCEPTION_LINE.findall(text)
    return found[-1] if found else ""


def _name(error: str) -> str:
    """Of the exception, without its module."""
    return error.strip().partition(":")[0].rpartition(".")[2]


def _cluster_reason(failed: TaskEvidence | None) -> str:
    return "" if failed is None else str((failed.cluster.get("termination_reason") or {}).get("code") or "")


def _detail(run: Mapping[str, Any], failed: TaskEvidence | None, reason: str) -> str:
    lines = [f"run page: {run['run_page_url']}"] if run.get("run_page_url") else []
    if failed is None:
        return "\n".join(lines)
    if cluster_id := failed.cluster.get("cluster_id"):
        whole = failed.cluster.get("termination_reason") or {}
        # Its parameters are a free map: shown whole, read by nobody.
        parameters = f" {json.dumps(whole['parameters'])}" if whole.get("parameters") else ""
        lines.append(f"cluster {cluster_id}" + (f" ended: {reason}{parameters}" if reason else ""))
    told = [event for event in failed.events if event.get("type") in TOLD_EVENTS]
    lines += [
        f"cluster event {event['type']}: {json.dumps(event.get('details') or {})}"
        for event in sorted(told, key=lambda event: event.get("timestamp") or 0)
    ]
    text = str(failed.output.get("error_trace") or failed.output.get("logs") or "").rstrip()
    return "\n".join([*lines, last_lines(text)])


def _one_line(text: str, longest: int = 500) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
