# SPDX-License-Identifier: Apache-2.0
"""Offload to host memory and to NVMe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from deepspeed_provider.deepspeed_config.findings import Facts, Found, Severity
from deepspeed_provider.deepspeed_config.rules.rule import Example, Rule, config, zero
from deepspeed_provider.deepspeed_config.schema import schema
from deepspeed_provider.deepspeed_config.subject import AUTO, Subject

_ZERO: Final = "zero_optimization"
_PARAM: Final = f"{_ZERO}.offload_param"
_OPTIMIZER: Final = f"{_ZERO}.offload_optimizer"
_NVME_ONLY: Final = (
    *("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init"),
)
_STAGE_3_ONLY: Final = ("super_offload", "cpuadam_cores_perc")
# Not drives of the node's own: a network file system or a FUSE mount.
_REMOTE: Final = ("/dbfs", "/Volumes", "/Workspace", "/mnt/", "dbfs:", "s3:", "s3a:", "abfss:", "gs:")
_ADAMW: Final = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
_DRIVE: Final = "/local_disk0/deepspeed"


def _nvme(path: str | None = _DRIVE, **fields: Any) -> dict[str, Any]:
    """For examples: an offload to NVMe."""
    return {"device": "nvme", **({} if path is None else {"nvme_path": path}), **fields}


def _parameters_below_3(subject: Subject) -> Iterable[Found]:
    device = subject.device("offload_param")
    if device != "none" and subject.stage != 3:
        text = f"is silently ignored at stage {subject.stage}: only stage 3 partitions parameters."
        yield Found(path=_PARAM, value=device, problem=text, suggestion="Use stage 3, or offload_optimizer.")


def _optimizer_without_zero(subject: Subject) -> Iterable[Found]:
    device = subject.device("offload_optimizer")
    if device != "none" and subject.stage == 0:
        text = "is silently ignored at stage 0."
        yield Found(path=_OPTIMIZER, value=device, problem=text, suggestion="Use stage 1, 2 or 3.")


def _nvme_below_3(subject: Subject) -> Iterable[Found]:
    if subject.device("offload_optimizer") == "nvme" and subject.stage in (1, 2):
        text = f"goes to host memory at stage {subject.stage}: only stage 3 swaps to NVMe."
        yield Found(path=f"{_OPTIMIZER}.device", value="nvme", problem=text, suggestion="Use stage 3, or 'cpu'.")


def _no_path(subject: Subject) -> Iterable[Found]:
    for name in subject.on_nvme:
        path = f"{_ZERO}.{name}.nvme_path"
        if subject.get(path) in (None, ""):
            text = "is missing: DeepSpeed starts, and fails at the first swap."
            yield Found(path=path, value=subject.written(path), problem=text, suggestion=f"Use {_DRIVE!r}.")


def _remote_path(subject: Subject) -> Iterable[Found]:
    for name in subject.on_nvme:
        path = f"{_ZERO}.{name}.nvme_path"
        value = subject.written(path)
        if isinstance(value, str) and value.startswith(_REMOTE):
            text = "is no drive of the node's own; every step would wait for the network."
            yield Found(path=path, value=value, problem=text, suggestion=f"Use {_DRIVE!r}.")


def _missing(fact: str, text: str, hint: str) -> Any:
    def find(subject: Subject) -> Iterable[Found]:
        if getattr(subject.facts, fact) is False:
            for name in subject.on_nvme:
                yield Found(path=f"{_ZERO}.{name}.device", value="nvme", problem=text, suggestion=hint)

    return find


def _only_for_nvme(subject: Subject) -> Iterable[Found]:
    for offload in ("offload_optimizer", "offload_param"):
        device = subject.device(offload)
        for name, value in subject.section(f"{_ZERO}.{offload}").items():
            default = schema().sections[f"{_ZERO}.{offload}"].fields.get(name)
            idle = default is None or value == default.default
            if name in _NVME_ONLY and device != "nvme" and not idle and value != AUTO:
                text = f"has no effect with device {device!r}."
                hint = "Remove it, or use device 'nvme'."
                yield Found(path=f"{_ZERO}.{offload}.{name}", value=value, problem=text, suggestion=hint)
    if subject.section("aio") and not subject.on_nvme:
        hint = "Remove it, or offload to NVMe."
        yield Found(path="aio", value=subject.config["aio"], problem="has no effect without NVMe.", suggestion=hint)


def _partly(subject: Subject) -> Iterable[Found]:
    path = f"{_OPTIMIZER}.ratio"
    ratio = subject.number(path)
    if subject.section(_OPTIMIZER) and ratio is not None and ratio < 1 and subject.stage != 3:
        text = f"stage {subject.stage} offloads the whole optimizer or nothing."
        yield Found(path=path, value=ratio, problem=text, suggestion="Use 1.0, or stage 3.")


def _superchips(subject: Subject) -> Iterable[Found]:
    for name in _STAGE_3_ONLY:
        value = subject.written(f"{_OPTIMIZER}.{name}")
        if value not in (None, False, AUTO) and subject.stage != 3:
            text = f"has no effect at stage {subject.stage}."
            yield Found(path=f"{_OPTIMIZER}.{name}", value=value, problem=text, suggestion="Remove it, or use stage 3.")


def _slow_step(subject: Subject) -> Iterable[Found]:
    if subject.device("offload_optimizer") == "none" or subject.stage == 0:
        return
    name = subject.optimizer
    if name is None:
        path = "zero_force_ds_cpu_optimizer"
        if not subject.on(path):
            text = "lets any optimizer step on the CPU; torch's take several times as long as DeepSpeed's CPU Adam."
            hint = "Set it to true and pass DeepSpeedCPUAdam, or name AdamW in 'optimizer'."
            yield Found(path=path, value=False, problem=text, suggestion=hint)
        return
    known = schema().optimizers.get(name)
    if subject.on_torch or (known is not None and known.parameters and "cpu" not in known.parameters):
        text = "steps on the CPU in torch, several times slower than DeepSpeed's CPU Adam."
        hint = "Use AdamW without torch_adam."
        yield Found(path="optimizer.type", value=subject.written("optimizer.type"), problem=text, suggestion=hint)


RULES: Final = (
    Rule(
        name="parameters-below-stage-3",
        severity=Severity.ERROR,
        why="DeepSpeed accepts offload_param at any stage and ignores it below 3: the memory is not saved.",
        find=_parameters_below_3,
        accepted=Example(zero(3, offload_param={"device": "cpu"})),
        refused=Example(zero(2, offload_param={"device": "cpu"})),
    ),
    Rule(
        name="offload-without-zero",
        severity=Severity.ERROR,
        why="Without ZeRO nothing is offloaded.",
        find=_optimizer_without_zero,
        accepted=Example(zero(1, offload_optimizer={"device": "cpu"}) | _ADAMW),
        refused=Example(zero(0, offload_optimizer={"device": "cpu"}) | _ADAMW),
    ),
    Rule(
        name="nvme-below-stage-3",
        severity=Severity.ERROR,
        why="Stages 1 and 2 take any device for the CPU: the host runs out of memory instead.",
        find=_nvme_below_3,
        accepted=Example(zero(3, offload_optimizer=_nvme()) | _ADAMW),
        refused=Example(zero(2, offload_optimizer=_nvme()) | _ADAMW),
    ),
    Rule(
        name="nvme-without-path",
        severity=Severity.ERROR,
        why="DeepSpeed accepts NVMe without a path, and fails when it swaps.",
        find=_no_path,
        accepted=Example(zero(3, offload_param=_nvme())),
        refused=Example(zero(3, offload_param=_nvme(path=None))),
    ),
    Rule(
        name="nvme-on-a-network",
        severity=Severity.WARNING,
        why="Each step reads and writes all states.",
        find=_remote_path,
        accepted=Example(zero(3, offload_param=_nvme())),
        refused=Example(zero(3, offload_param=_nvme("/dbfs/tmp/offload"))),
    ),
    Rule(
        name="nvme-without-disk",
        severity=Severity.ERROR,
        why="The nodes have no drive of their own.",
        find=_missing("has_disk", "these nodes have no drive of their own.", "Use 'cpu', or nodes with NVMe drives."),
        accepted=Example(zero(3, offload_param=_nvme()), Facts(has_disk=True)),
        refused=Example(zero(3, offload_param=_nvme()), Facts(has_disk=False)),
    ),
    Rule(
        name="nvme-without-libaio",
        severity=Severity.ERROR,
        why="DeepSpeed compiles its asynchronous reader against libaio when it starts.",
        find=_missing("has_libaio", "libaio is not installed.", "Install libaio-dev by an init script, or use 'cpu'."),
        accepted=Example(zero(3, offload_param=_nvme()), Facts(has_libaio=True)),
        refused=Example(zero(3, offload_param=_nvme()), Facts(has_libaio=False)),
    ),
    Rule(
        name="only-for-nvme",
        severity=Severity.WARNING,
        why="Paths, buffers and pipelines are those of the swapper to NVMe.",
        find=_only_for_nvme,
        accepted=Example(zero(3, offload_param=_nvme(buffer_size=200_000_000)) | {"aio": {"queue_depth": 16}}),
        refused=Example(zero(3, offload_param={"device": "cpu", "buffer_size": 200_000_000})),
    ),
    Rule(
        name="partial-offload",
        severity=Severity.ERROR,
        why="DeepSpeed asserts stage 3 for a ratio below 1.",
        find=_partly,
        accepted=Example(zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}) | _ADAMW),
        refused=Example(zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}) | _ADAMW),
    ),
    Rule(
        name="superchip-fields",
        severity=Severity.WARNING,
        why="SuperOffload is an optimizer of stage 3.",
        find=_superchips,
        accepted=Example(zero(3, offload_optimizer={"device": "cpu", "super_offload": True}) | _ADAMW),
        refused=Example(zero(2, offload_optimizer={"device": "cpu", "super_offload": True}) | _ADAMW),
    ),
    Rule(
        name="slow-cpu-step",
        severity=Severity.WARNING,
        why="Offloaded states are stepped on the CPU, by DeepSpeed's vectorised Adam, Adagrad or Lion.",
        find=_slow_step,
        accepted=Example(zero(2, offload_optimizer={"device": "cpu"}) | _ADAMW),
        refused=Example(
            zero(2, offload_optimizer={"device": "cpu"})
            | config(optimizer={"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}})
        ),
    ),
)
