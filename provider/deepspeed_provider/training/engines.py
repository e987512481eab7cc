# SPDX-License-Identifier: Apache-2.0
"""From a plan to a DeepSpeed engine: model, adapter, optimizer, learning-rate schedule."""

from __future__ import annotations

import importlib.util
import logging
from functools import partial
from pathlib import Path
from typing import Any

from .failures import InputError
from .locks import extension_build
from .models import load_model
from .plan import MethodSettings, TrainingPlan
from .schedule import learning_rate_factor

log = logging.getLogger(__name__)

# Models whose kernels read the weight of this layer past the layer, so that an adapter on it would do nothing; peft
# refuses one. Source: tuners/tuners_utils.py of peft 0.21.2, read 2026-12.
MAMBA_TYPES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
MAMBA_WITHOUT_ADAPTER = ("out_proj",)


def build(plan: TrainingPlan, folder: Path, *, total_steps: int) -> Any:
    """The engine for the model in ``folder``. Every rank calls it; the process group must be there."""
    import deepspeed

    config = check_config(plan)
    stage = zero_stage(plan)
    if stage == 3:
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        # While it lives, transformers loads straight into ZeRO-3 partitions: no rank holds the whole model.
        partitioned_loading: Any = HfDeepSpeedConfig(config)  # type: ignore[no-untyped-call]
    model = load_model(folder, plan.model)
    if stage == 3:
        del partitioned_loading
    model.config.use_cache = False
    if plan.optimization.gradient_checkpointing:
        _checkpoint_gradients(model, stage)
    if plan.method.name == "lora":
        model = with_lora(model, plan.method)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = None if "optimizer" in config else build_optimizer(trainable, plan, config)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=trainable,
        optimizer=optimizer,
        lr_scheduler=partial(_scheduler, plan=plan, total_steps=total_steps),
        config=config,
    )
    return engine


def check_libraries(plan: TrainingPlan) -> None:
    """Raises InputError for a library that the plan's method needs and the cluster lacks."""
    # GPU runtimes of Databricks hold all the others.
    if plan.method.name == "lora" and importlib.util.find_spec("peft") is None:
        raise InputError(
            "method.name = 'lora': needs the package peft, which this cluster lacks. Add it to the libraries of the "
            "run (peft==0.15.2 beside transformers 4.50, peft>=0.21 beside 5.24), or use method 'full'."
        )


def check_config(plan: TrainingPlan) -> dict[str, Any]:
    """A copy of the plan's DeepSpeed configuration; raises InputError where the two contradict each other.

    DeepSpeed itself would train in another precision or batch size without a word.
    """
    config = dict(plan.deepspeed_config)
    for precision in ("bf16", "fp16"):
        enabled = bool(config.get(precision, {}).get("enabled", False))
        if enabled != (plan.model.precision == precision):
            raise InputError(
                f"model.precision = {plan.model.precision!r}, but the DeepSpeed configuration has "
                f"{precision}.enabled = {enabled}. They must agree."
            )
    if plan.model.precision == "fp16" and not plan.use_gpu:
        raise InputError("model.precision = 'fp16': not on a CPU. Use 'fp32' or 'bf16'.")
    settings = plan.optimization
    expected = {
        "train_micro_batch_size_per_gpu": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "train_batch_size": settings.micro_batch_size * settings.gradient_accumulation_steps * plan.world_size,
    }
    for name, value in expected.items():
        if config.setdefault(name, value) != value:
            raise InputError(
                f"deepspeed_config.{name} = {config[name]!r}, but micro_batch_size, gradient_accumulation_steps "
                f"and world_size of the plan make it {value}."
            )
    return config


def zero_stage(plan: TrainingPlan) -> int:
    return int(plan.deepspeed_config.get("zero_optimization", {}).get("stage", 0))


def _checkpoint_gradients(model: Any, stage: int) -> None:
    if not model.supports_gradient_checkpointing:
        log.warning(
            "%s has no gradient checkpointing in this transformers: it trains without, and takes more memory than a "
            "plan with it counts.",
            type(model).__name__,
        )
        return
    # Re-entrant at stage 3: the other kind compares shapes of parameters that are partitioned
    # again by then (huggingface/transformers#26221).
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": stage == 3})
    model.enable_input_require_grads()


def with_lora(model: Any, method: MethodSettings) -> Any:
    """``model`` with new low-rank adapters, the only parameters that still take gradients."""
    from peft import LoraConfig, get_peft_model

    targets: Any = list(method.lora_targets)
    everywhere = targets == ["all-linear"]
    config = LoraConfig(
        r=method.lora_rank,
        lora_alpha=method.lora_alpha,
        lora_dropout=method.lora_dropout,
        target_modules="all-linear" if everywhere else targets,
        exclude_modules=list(MAMBA_WITHOUT_ADAPTER) if everywhere and model.config.model_type in MAMBA_TYPES else None,
        task_type="CAUSAL_LM",
    )
    try:
        # One precision for all parameters: DeepSpeed keeps the float32 copies for the optimizer itself.
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise InputError(f"method.lora_targets = {targets!r}: {error}") from error


def build_optimizer(trainable: list[Any], plan: TrainingPlan, config: dict[str, Any]) -> Any:
    """AdamW; DeepSpeed's own for optimizer state that lives in host memory."""
    import torch

    groups = _decay_groups(trainable, plan.optimization.weight_decay)
    options: dict[str, Any] = {"lr": plan.optimization.learning_rate, "betas": (0.9, 0.999), "eps": 1e-8}
    if _offloads_optimizer(config):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        try:
            with extension_build():
                return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
        except Exception as error:  # noqa: BLE001  (a compiler that is missing or fails raises anything)
            log.warning("DeepSpeedCPUAdam cannot be built (%s); torch's AdamW does its work, more slowly", error)
            config["zero_force_ds_cpu_optimizer"] = False
    # Unfused, each step would take one more copy of the second moments.
    return torch.optim.AdamW(groups, fused=plan.use_gpu, **options)


def learning_rate(engine: Any) -> float:
    """What the next optimizer step uses."""
    return float(engine.get_lr()[0])


def _scheduler(optimizer: Any, *, plan: TrainingPlan, total_steps: int) -> Any:
    from torch.optim.lr_scheduler import LambdaLR

    settings = plan.optimization
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate  # the plan's, also where the configuration names an optimizer
    factor = partial(
        learning_rate_factor,
        total_steps=total_steps,
        warmup_ratio=settings.warmup_ratio,
        schedule=settings.schedule,
    )
    return LambdaLR(optimizer, factor)


def _decay_groups(trainable: list[Any], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    # A parameter partitioned by ZeRO-3 is empty; its shape is in ds_shape.
    matrices = [parameter for parameter in trainable if len(getattr(parameter, "ds_shape", parameter.shape)) > 1]
    chosen = {id(parameter) for parameter in matrices}
    vectors = [parameter for parameter in trainable if id(parameter) not in chosen]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _offloads_optimizer(config: dict[str, Any]) -> bool:
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    return bool(offload.get("device", "none") != "none")
