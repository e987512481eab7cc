# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a causal language model with DeepSpeed: load, train, evaluate, save. Flat on purpose; copy it."""

from __future__ import annotations

import logging
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import checkpoints, data, engines, heldout, models
from .failures import InputError
from .plan import OptimizationSettings, TrainingPlan
from .progress import Reporter
from .ranks import Rank, largest_over_ranks, peak_memory_bytes, seed_everything, start_deepspeed, sum_over_ranks
from .tracking import Tracker

log = logging.getLogger(__name__)

# The train loss of a run is the mean of so many last steps: one step alone is noise.
FINAL_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Encoded rows: all of the training split, and this rank's batches of the held-out rows it evaluates."""

    train: list[data.Example]
    heldout: list[list[data.Example]]


@dataclass(slots=True, kw_only=True)
class History:
    """What was measured, one entry per optimizer step; sums and means are over all ranks."""

    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Over the steps after the first, which pays for warming up."""
        skip = 1 if len(self.tokens) > 1 else 0
        return sum(self.tokens[skip:]) / max(sum(self.step_seconds[skip:]), 1e-9)


def finetune(plan: TrainingPlan, rank: Rank, reporter: Reporter) -> dict[str, Any]:
    """Run the whole job in this rank; returns the result's metrics and model, complete in rank 0 only."""
    engines.check_libraries(plan)
    tracker = Tracker(plan.tracking if rank.is_first else None)
    tracker.log_params(_params(plan))
    with tempfile.TemporaryDirectory() as scratch:
        folder = models.resolve(plan.model.ref, plan.model.revision, plan.cache_uri)
        tokenizer = models.load_tokenizer(folder)
        dataset = _load_dataset(plan, rank, tokenizer, Path(scratch))
        start_deepspeed(rank)
        seed_everything(plan.optimization.seed)
        engine = engines.build(plan, folder, total_steps=_total_steps(plan, len(dataset.train)))
        history = _train(plan, rank, engine, tokenizer, dataset, reporter, tracker)
        reporter.update(phase="evaluating")
        eval_loss = heldout.mean_loss(engine, dataset.heldout, pad_token_id=tokenizer.pad_token_id, device=rank.device)
        metrics = _metrics(history, eval_loss, rank)
        tracker.log_metrics(_scalars(metrics), step=len(history.losses))
        reporter.update(phase="saving", eval_loss=eval_loss)
        result = checkpoints.save_and_verify(
            plan, rank, engine, tokenizer, base=folder, probe=next((batch for batch in dataset.heldout if batch), [])
        )
        reporter.update(phase="logging")
        result["mlflow_model_uri"] = tracker.log_model(plan, base=folder, example_prompt=_example_prompt(plan, scratch))
        tracker.close()
    return {"metrics": metrics, **result}


def _load_dataset(plan: TrainingPlan, rank: Rank, tokenizer: Any, cache: Path) -> Dataset:
    settings = plan.optimization
    train = data.read_rows(plan.dataset_uri, "train", cache)
    held = data.read_rows(plan.dataset_uri, "heldout", cache, limit=settings.eval_rows)
    return Dataset(
        train=data.encode_all(tokenizer, train, settings.sequence_length),
        heldout=data.heldout_batches(
            data.encode_all(tokenizer, held, settings.sequence_length),
            batch_size=settings.micro_batch_size,
            rank=rank.rank,
            world_size=rank.world_size,
        ),
    )


def _total_steps(plan: TrainingPlan, row_count: int) -> int:
    settings = plan.optimization
    if settings.max_steps is not None:
        return settings.max_steps
    if settings.epochs is None:
        raise InputError("optimization: neither max_steps nor epochs is set. Set exactly one of them.")
    rows_per_step = settings.micro_batch_size * settings.gradient_accumulation_steps * plan.world_size
    return max(1, math.ceil(settings.epochs * data.steps_per_epoch(row_count, rows_per_step)))


def _train(
    plan: TrainingPlan,
    rank: Rank,
    engine: Any,
    tokenizer: Any,
    dataset: Dataset,
    reporter: Reporter,
    tracker: Tracker,
) -> History:
    settings = plan.optimization
    total_steps = _total_steps(plan, len(dataset.train))
    batches = data.micro_batches(
        dataset.train,
        micro_batch_size=settings.micro_batch_size,
        accumulation=settings.gradient_accumulation_steps,
        rank=rank.rank,
        world_size=rank.world_size,
        seed=settings.seed,
    )
    history = History()
    reporter.update(phase="training", total_steps=total_steps)
    engine.train()
    for step in range(1, total_steps + 1):
        learning_rate = engines.learning_rate(engine)
        started_s = time.perf_counter()
        loss, tokens = _one_step(engine, batches, settings, tokenizer.pad_token_id, rank)
        if not math.isfinite(loss):
            raise InputError(
                f"the training loss became {loss} at step {step}. Lower optimization.learning_rate "
                f"(now {settings.learning_rate}), raise warmup_ratio, or train in bf16 or fp32 instead of fp16."
            )
        history.losses.append(loss)
        history.tokens.append(tokens)
        history.step_seconds.append(time.perf_counter() - started_s)
        rate = tokens / history.step_seconds[-1]
        reporter.update(step=step, loss=loss, learning_rate=learning_rate, tokens_per_second=rate)
        tracker.log_metrics({"loss": loss, "learning_rate": learning_rate, "tokens_per_second": rate}, step=step)
        if settings.eval_steps and step % settings.eval_steps == 0 and step < total_steps:
            reporter.update(phase="evaluating")
            eval_loss = heldout.mean_loss(
                engine, dataset.heldout, pad_token_id=tokenizer.pad_token_id, device=rank.device
            )
            tracker.log_metrics({"eval_loss": eval_loss}, step=step)
            reporter.update(phase="training", eval_loss=eval_loss)
    return history


def _one_step(
    engine: Any, batches: Iterator[list[data.Example]], settings: OptimizationSettings, pad_token_id: int, rank: Rank
) -> tuple[float, int]:
    """One optimizer step. Returns the mean of all ranks' micro-batch losses, and the tokens they held."""
    loss_sum, tokens = 0.0, 0
    # engine.step() updates the weights at the last micro batch only, by its own count of them.
    for _ in range(settings.gradient_accumulation_steps):
        batch = data.collate(next(batches), pad_token_id, rank.device)
        loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        loss_sum += float(loss.detach())
        tokens += int(batch["attention_mask"].sum())
    total_loss, total_tokens = sum_over_ranks(loss_sum, tokens, device=rank.device)
    return total_loss / (settings.gradient_accumulation_steps * rank.world_size), int(total_tokens)


def _metrics(history: History, eval_loss: float, rank: Rank) -> dict[str, Any]:
    final = history.losses[-FINAL_STEPS:]
    ordered = sorted(history.step_seconds)
    return {
        "train_loss": statistics.fmean(final),
        "first_train_loss": history.losses[0],
        "eval_loss": eval_loss,
        "eval_perplexity": heldout.perplexity(eval_loss),
        "steps": len(history.losses),
        "tokens": sum(history.tokens),
        "tokens_per_second": history.tokens_per_second,
        "peak_memory_bytes": int(largest_over_ranks(peak_memory_bytes(rank.use_gpu) or 0, device=rank.device)),
        "step_seconds": {
            "first": history.step_seconds[0],
            "median": statistics.median(ordered),
            "longest": ordered[-1],
            "total": sum(ordered),
        },
    }


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def _params(plan: TrainingPlan) -> dict[str, Any]:
    """What MLflow shows as the run's parameters."""
    wire = plan.to_json()
    groups = ("model", "method", "optimization")
    nested = {f"{group}.{name}": value for group in groups for name, value in wire[group].items()}
    zero = plan.deepspeed_config.get("zero_optimization", {})
    return {
        **nested,
        "world_size": plan.world_size,
        "zero_stage": zero.get("stage", 0),
        "train_batch_size": plan.deepspeed_config.get("train_batch_size"),
        "dataset_uri": plan.dataset_uri,
    }


def _example_prompt(plan: TrainingPlan, scratch: str) -> str:
    row = data.read_rows(plan.dataset_uri, "heldout", Path(scratch), limit=1)[0]
    return row.prompt or row.completion[:80]
