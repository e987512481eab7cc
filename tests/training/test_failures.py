# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from deepspeed_provider.errors import FailureKind
from deepspeed_provider.training import failures


def named(name: str, *bases: type[BaseException]) -> type[BaseException]:
    """A class as torch or DeepSpeed names it, so that this table needs neither."""
    return type(name, bases or (RuntimeError,), {})


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


CUDA_2_13 = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB"
CASES = [
    pytest.param(named("OutOfMemoryError")(CUDA_2_13), "GPU_OOM", id="torch.OutOfMemoryError"),
    pytest.param(RuntimeError(CUDA_2_13), "GPU_OOM", id="cuda out of memory as a RuntimeError"),
    pytest.param(RuntimeError("CUDA error: out of memory"), "GPU_OOM", id="cuda driver out of memory"),
    pytest.param(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        "GPU_OOM",
        id="cublas allocation",
    ),
    pytest.param(MemoryError(), "HOST_OOM", id="MemoryError"),
    pytest.param(named("_ArrayMemoryError", MemoryError)("Unable to allocate 8 GiB"), "HOST_OOM", id="numpy"),
    pytest.param(
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 4294967296000 bytes. Error code 12 (Cannot allocate memory)"
        ),
        "HOST_OOM",
        id="torch CPU allocator",
    ),
    pytest.param(OSError(12, "Cannot allocate memory"), "HOST_OOM", id="fork without memory"),
    pytest.param(failures.InputError("no such model"), "USER", id="our own check"),
    pytest.param(ModuleNotFoundError("No module named 'peft'"), "USER", id="missing library"),
    pytest.param(named("DeepSpeedConfigError", Exception)("batch"), "USER", id="DeepSpeed configuration"),
    pytest.param(named("DistBackendError", named("DistError"))("NCCL error"), "TRANSIENT", id="NCCL"),
    pytest.param(
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.1.1]:50"),
        "TRANSIENT",
        id="gloo peer gone",
    ),
    pytest.param(ConnectionResetError("Connection reset by peer"), "TRANSIENT", id="connection reset"),
    pytest.param(TimeoutError("store"), "TRANSIENT", id="rendezvous time-out"),
    pytest.param(ValueError("not one of ours"), "UNKNOWN", id="somebody else's ValueError"),
    pytest.param(failures.AlreadyStarted("again"), "UNKNOWN", id="second start"),
    pytest.param(SystemExit(3), "UNKNOWN", id="SystemExit"),
    pytest.param(
        chained(RuntimeError("while loading"), named("OutOfMemoryError")(CUDA_2_13)), "GPU_OOM", id="cause in the chain"
    ),
]


@pytest.mark.parametrize(("error", "kind"), CASES)
def test_kind_of(error: BaseException, kind: str) -> None:
    assert failures.kind_of(error) == kind
    assert FailureKind(kind)


def test_real_allocator_failure_is_host_oom() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert failures.kind_of(caught.value) == "HOST_OOM"


def test_a_suppressed_context_is_not_a_cause() -> None:
    def suppress() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise KeyError("x") from None

    with pytest.raises(KeyError) as caught:
        suppress()
    assert failures.kind_of(caught.value) == "UNKNOWN"


def test_record_is_small_json_with_the_tail_of_the_traceback() -> None:
    def deep(level: int) -> None:
        if level:
            deep(level - 1)
        raise failures.InputError("the bottom")

    with pytest.raises(failures.InputError) as caught:
        deep(200)
    record = failures.failure_record(
        caught.value, rank=1, phase="training", step=7, peak_memory_bytes=123, time_s=1000.5
    )
    assert json.loads(json.dumps(record)) == record
    assert len(record["traceback"].splitlines()) <= failures.TRACEBACK_LINES
    assert "the bottom" in record["traceback"]
    expected = {
        "kind": "USER",
        "type": "InputError",
        "message": "the bottom",
        "rank": 1,
        "step": 7,
        "phase": "training",
    }
    assert expected.items() <= record.items()
    assert (record["time"], record["peak_memory_bytes"]) == (1000.5, 123)
