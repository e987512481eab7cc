"""What a person reads about a run that failed on Databricks."""

from __future__ import annotations

import json

import pytest
from deepspeed_provider.backends.jobs_evidence import TaskEvidence, failure_of, marked
from deepspeed_provider.training.driver_side import FAILURE_MARK

PAGE = "https://example.cloud.databricks.com/?o=1#job/run/7"


def ended(code, message="", **more):
    return {"status": {"state": "TERMINATED", "termination_details": {"code": code, "message": message}}, **more}


def judged(code, message="", *, output=None, reason=None, events=()):
    ended_for = {"code": reason, "parameters": {"why": "x"}}
    cluster = {"cluster_id": "c-1", "termination_reason": ended_for} if reason else {}
    task = TaskEvidence(task=ended(code, message), output=output or {}, cluster=cluster, events=events)
    return failure_of(ended(code, message, run_page_url=PAGE), [task])


FAILED = "RUN_EXECUTION_ERROR"
KINDS = {
    "no machines": ("CLOUD_FAILURE", {}, "AWS_INSUFFICIENT_INSTANCE_CAPACITY_FAILURE", "CAPACITY"),
    "no quota, told by the cluster only": ("CLUSTER_ERROR", {}, "AZURE_QUOTA_EXCEEDED_EXCEPTION", "CAPACITY"),
    "spot machine taken": ("CLUSTER_ERROR", {}, "SPOT_INSTANCE_TERMINATION", "CAPACITY"),
    "driver out of memory": ("DRIVER_ERROR", {}, "DRIVER_OUT_OF_MEMORY", "HOST_OOM"),
    "driver gone": ("DRIVER_ERROR", {}, None, "HOST_OOM"),
    "library": ("LIBRARY_INSTALLATION_ERROR", {}, None, "USER"),
    "platform": ("INTERNAL_ERROR", {}, None, "TRANSIENT"),
    "time limit": ("CANCELED", {}, None, "USER"),
    "cluster ended by a person": ("CLUSTER_TERMINATED_BY_USER", {}, None, "CANCELLED"),
    "unknown code": ("SOMETHING_NEW", {}, None, "UNKNOWN"),
    "GPU memory in the trace, echoes in the error": (
        FAILED,
        {"error": "Watchdog caught collective", "error_trace": "torch.OutOfMemoryError: CUDA out of memory"},
        None,
        "GPU_OOM",
    ),
    "killed for host memory": (FAILED, {"error": "exits with return code = -9"}, None, "HOST_OOM"),
    "a missing package": (FAILED, {"error": "ModuleNotFoundError: No module named 'peft'"}, None, "USER"),
    "a broken collective": (FAILED, {"error": "DistBackendError: NCCL error"}, None, "TRANSIENT"),
    "a port that was taken": (FAILED, {"error": "DistNetworkError: port: 43103, name: EADDRINUSE"}, None, "TRANSIENT"),
    "Java's memory": (FAILED, {"error": "java.lang.OutOfMemoryError: Java heap space"}, None, "HOST_OOM"),
    "NCCL's chatter": (FAILED, {"error": "ValueError: bad column", "logs": "g5: NCCL INFO ring"}, None, "UNKNOWN"),
    "a warning of what was got over": (
        FAILED,
        {"error": "ZeroDivisionError", "logs": "ConnectionResetError: Connection reset by peer\nretrying"},
        None,
        "UNKNOWN",
    ),
    "what somebody caught": (
        FAILED,
        {"error": "RuntimeError: ranks failed", "logs": "ImportError caught: falling back\n[rank0]: KeyError: 'x'"},
        None,
        "UNKNOWN",
    ),
    "a rank's missing package": (
        FAILED,
        {"error": "RuntimeError: ranks failed", "logs": "[rank0]: ModuleNotFoundError: No module named 'x'\nbye"},
        None,
        "USER",
    ),
    "a chain of exceptions": (
        FAILED,
        {"error": "KeyError: 'x'", "error_trace": "ImportError: no y\nDuring handling\nKeyError: 'x'"},
        None,
        "UNKNOWN",
    ),
    "user code": (FAILED, {"error": "ValueError: no rows"}, None, "UNKNOWN"),
}


@pytest.mark.parametrize(("code", "output", "reason", "kind"), KINDS.values(), ids=KINDS)
def test_kind(code, output, reason, kind):
    assert judged(code, output=output, reason=reason).kind == kind


def test_cause_place_link_and_last_lines():
    trace = "\n".join(f"line {number}" for number in range(50))
    events = [
        {"type": "RUNNING", "timestamp": 1},
        {"type": "NODES_LOST", "timestamp": 2, "details": {"reason": {"code": "X"}}},
    ]
    output = {"error": "ValueError: no rows\nmore", "error_trace": trace}
    failure = judged(FAILED, output=output, reason="JOB_FINISHED", events=events)
    assert failure.message == "the training failed: ValueError: no rows"
    lines = failure.detail.splitlines()
    assert lines[0] == f"run page: {PAGE}"
    assert lines[1] == 'cluster c-1 ended: JOB_FINISHED {"why": "x"}'
    assert lines[2].startswith("cluster event NODES_LOST")
    assert lines[3:] == [f"line {number}" for number in range(30, 50)]


def test_without_output_the_platforms_message_is_the_cause():
    failure = judged("INVALID_CLUSTER_REQUEST", "no such node type")
    assert failure.message.endswith("no such node type")
    assert failure.evidence == "termination code INVALID_CLUSTER_REQUEST"


def test_what_ranks_printed_wins_over_codes_and_patterns():
    early = {"kind": "GPU_OOM", "rank": 3, "time": 10.0, "message": "OutOfMemoryError: full", "step": 0}
    echo = {"kind": "TRANSIENT", "rank": 0, "time": 5.0, "message": "NCCL timeout"}
    logs = "\n".join(["noise", *(FAILURE_MARK + json.dumps(each) for each in (echo, early)), FAILURE_MARK + "{cut"])
    failure = judged(FAILED, output={"error": "RuntimeError: NCCL", "logs": logs})
    assert (failure.kind, failure.rank, failure.step) == ("GPU_OOM", 3, 0)


def test_the_earliest_failure_of_several_tasks_is_the_cause():
    tasks = [
        TaskEvidence(task=ended("SUCCESS")),
        TaskEvidence(task=ended(FAILED), output={"error": "ValueError: first"}),
        TaskEvidence(task=ended(FAILED), output={"error": "ValueError: second"}),
    ]
    assert failure_of(ended(FAILED), tasks).message.endswith("first")


def test_marked_lines_are_found_anywhere_in_a_line_and_broken_ones_left_out():
    logs = 'x MARK {"a": 1}\nMARK [1]\nMARK {"b"\nMARK {"c": 2}'
    assert marked(logs, "MARK ") == [{"a": 1}, {"c": 2}]
