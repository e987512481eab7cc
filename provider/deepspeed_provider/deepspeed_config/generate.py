# SPDX-License-Identifier: Apache-2.0
"""The whole DeepSpeed configuration as numbers: nothing is left for DeepSpeed to guess.

No value is ever "auto": outside the Hugging Face trainer DeepSpeed takes ``"enabled": "auto"`` as off
and most other autos as its defaults, silently. Activation checkpointing is not here: it is the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from deepspeed_provider.deepspeed_config.buckets import Buckets, bucket_sizes
from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.sizing.options import Offload, OffloadDevice

# On Databricks the nodes' own drives are mounted here; every other path is a network file system or the small
# root disk.
NVME_PATH: Final = "/local_disk0/deepspeed"

# Elements of one buffer through which parameters are read from NVMe: DeepSpeed's own default.
PARAMETER_BUFFER_ELEMENTS: Final = 100_000_000
# Adam swaps three tensors of each parameter, master weights and two moments, and its gradient.
OPTIMIZER_BUFFERS: Final = 4
PARAMETER_BUFFERS: Final = 5

# Elements that stage 3 may hold gathered, and steps through at a time: DeepSpeed's own defaults.
GATHERED_ELEMENTS: Final = 1_000_000_000
SUB_GROUP_ELEMENTS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTriple:
    """Sequences per optimizer step, and how they are split."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int

    @property
    def effective_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What a plan has decided, as far as DeepSpeed must know it.

    Attributes:
        batch: must be of the world size that the training will find; DeepSpeed checks the product.
        zero_stage: 0 to 3.
        precision: ``fp32``, ``bf16`` or ``fp16``; fp16 scales the loss dynamically, from 2^16.
        gradient_clipping: largest global norm of the gradients.
        use_gpu: sizes buckets, and allows overlap and pinned memory.
        offload: what leaves the GPU; parameters need stage 3, the optimizer any stage but 0.
        offload_device: where it goes; NVMe needs stage 3.
        nvme_path: folder on a drive of the node's own, where ``offload_device`` is NVMe.
        hidden_size: of the model, where known: buckets follow its square.
        parameters: elements of all weights, where known.
        trained_parameters: elements that take gradients (an adapter's, with LoRA), where known.
        largest_parameter: elements of the largest single tensor, where known; it must fit a buffer of NVMe.

    Raises:
        SpecError: for settings that DeepSpeed refuses, or would silently train without.
    """

    batch: BatchTriple
    zero_stage: int
    precision: str
    gradient_clipping: float
    use_gpu: bool = True
    offload: Offload = Offload.NONE
    offload_device: OffloadDevice = OffloadDevice.CPU
    nvme_path: str = NVME_PATH
    hidden_size: int | None = None
    parameters: int | None = None
    trained_parameters: int | None = None
    largest_parameter: int | None = None

    def __post_init__(self) -> None:
        problems = _contradictions(self)
        if problems:
            raise SpecError(problems)

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload in (Offload.OPTIMIZER, Offload.ALL)

    @property
    def offloads_parameters(self) -> bool:
        return self.offload in (Offload.PARAMETERS, Offload.ALL)

    @property
    def on_nvme(self) -> bool:
        return self.offload is not Offload.NONE and self.offload_device is OffloadDevice.NVME


def deepspeed_config(settings: EngineSettings) -> dict[str, Any]:
    """DeepSpeed's JSON for one training; every value in it is a number, a switch, a device or a path."""
    batch, precision = settings.batch, settings.precision
    config: dict[str, Any] = {
        "train_batch_size": batch.effective_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": settings.gradient_clipping,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": _fp16(precision),
        "zero_optimization": _zero(settings),
        # The training passes its own AdamW with warm-up and decay.
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
        # Progress is written by the training itself; DeepSpeed's own lines would only fill the log.
        "steps_per_print": 1_000_000,
    }
    if settings.offloads_optimizer:
        # The training then steps with DeepSpeed's CPU Adam; torch's would take several times as long.
        config["zero_force_ds_cpu_optimizer"] = True
    if settings.on_nvme:
        config["aio"] = _aio()
    return config


def _contradictions(settings: EngineSettings) -> list[FieldProblem]:
    stage, problems = settings.zero_stage, []
    if stage not in (0, 1, 2, 3):
        problems.append(_problem("zero_stage", stage, "there is no such stage", "Use 0, 1, 2 or 3."))
    if settings.precision not in ("fp32", "bf16", "fp16"):
        text = "DeepSpeed has no such precision"
        problems.append(_problem("precision", str(settings.precision), text, "Use fp32, bf16 or fp16."))
    if settings.offloads_parameters and stage != 3:
        text = f"ZeRO stage {stage} cannot offload parameters"
        problems.append(_problem("offload", settings.offload.value, text, "Use zero_stage 3, or 'optimizer'."))
    elif settings.offloads_optimizer and stage == 0:
        text = "there is no offload without ZeRO"
        problems.append(_problem("offload", settings.offload.value, text, "Use zero_stage 1, 2 or 3."))
    if settings.on_nvme and stage != 3:
        text = f"ZeRO stage {stage} offloads to the CPU only"
        problems.append(_problem("offload_device", "nvme", text, "Use zero_stage 3, or 'cpu'."))
    return problems


def _problem(field: str, value: object, problem: str, suggestion: str) -> FieldProblem:
    return FieldProblem(field=field, value=value, problem=problem, suggestion=suggestion)


def _fp16(precision: str) -> dict[str, Any]:
    """Dynamic loss scaling (``loss_scale`` 0): from 2^16, doubled after 1000 good steps, halved after 2 bad ones."""
    if precision != "fp16":
        return {"enabled": False}
    return {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }


def _zero(settings: EngineSettings) -> dict[str, Any]:
    """Without the keys that the stage does not read."""
    stage = settings.zero_stage
    if stage == 0:
        return {"stage": 0}
    sizes = bucket_sizes(
        hidden_size=settings.hidden_size,
        parameters=settings.parameters,
        trained_parameters=settings.trained_parameters,
        use_gpu=settings.use_gpu,
    )
    config: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": sizes.reduce,
        "contiguous_gradients": True,
        # Overlap needs streams beside the computing one, which a CPU has not.
        "overlap_comm": settings.use_gpu,
    }
    config |= _stage_3(sizes) if stage == 3 else {"allgather_bucket_size": sizes.reduce}
    if settings.offloads_optimizer:
        config["offload_optimizer"] = _offloaded_optimizer(settings)
    if settings.offloads_parameters:
        config["offload_param"] = _offloaded_parameters(settings)
    return config


def _stage_3(sizes: Buckets) -> dict[str, Any]:
    return {
        "stage3_prefetch_bucket_size": sizes.prefetch,
        "stage3_param_persistence_threshold": sizes.persistence_threshold,
        "stage3_max_live_parameters": GATHERED_ELEMENTS,
        "stage3_max_reuse_distance": GATHERED_ELEMENTS,
        "sub_group_size": SUB_GROUP_ELEMENTS,
        # Each rank holds a shard; a model folder needs whole weights.
        "stage3_gather_16bit_weights_on_model_save": True,
    }


def _offloaded_optimizer(settings: EngineSettings) -> dict[str, Any]:
    # Pinned pages, which a CPU-only torch cannot make, let the copies overlap with the computation.
    config: dict[str, Any] = {"device": settings.offload_device.value, "pin_memory": settings.use_gpu}
    if settings.on_nvme:
        config |= {"nvme_path": settings.nvme_path, "buffer_count": OPTIMIZER_BUFFERS}
    return config


def _offloaded_parameters(settings: EngineSettings) -> dict[str, Any]:
    config: dict[str, Any] = {"device": settings.offload_device.value, "pin_memory": settings.use_gpu}
    if settings.on_nvme:
        # Each rank reads its part of a tensor into one buffer, whole.
        part = -(-(settings.largest_parameter or 0) // settings.batch.world_size)
        config |= {
            "nvme_path": settings.nvme_path,
            "buffer_count": PARAMETER_BUFFERS,
            "buffer_size": max(PARAMETER_BUFFER_ELEMENTS, part),
        }
    return config


def _aio() -> dict[str, Any]:
    """Asynchronous reads and writes through libaio: DeepSpeed's own defaults, spelled out. Bytes, then counts."""
    return {
        "block_size": 1_048_576,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
    }
