# SPDX-License-Identifier: Apache-2.0
"""Compare the base and the tuned model on held-out rows: loss, perplexity, and answers side by side."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import data, heldout, models, storage
from .failures import InputError
from .plan import EvaluationSettings, TrainingPlan
from .progress import Reporter
from .ranks import Rank, join_process_group, seed_everything
from .tracking import Tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One held-out prompt, the answer that the data gives, and what each model answers (greedy)."""

    prompt: str
    reference: str
    base: str
    tuned: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """One model's mean loss per token over all ranks, and its answers (rank 0 only)."""

    loss: float
    texts: list[str]


def evaluate(plan: TrainingPlan, rank: Rank, reporter: Reporter) -> dict[str, Any]:
    """Run the whole job in this rank; the result is complete in rank 0.

    One model after the other is loaded, so that a machine that can hold one can compare two.
    """
    settings = plan.evaluation
    if settings is None:
        raise InputError("evaluation: missing. An 'evaluate' job needs at least evaluation.tuned_uri.")
    tracker = Tracker(plan.tracking if rank.is_first else None)
    join_process_group(rank)
    seed_everything(plan.optimization.seed)
    with tempfile.TemporaryDirectory() as scratch:
        rows = data.read_rows(plan.dataset_uri, "heldout", Path(scratch), limit=settings.rows)
        base_folder = models.resolve(plan.model.ref, plan.model.revision, plan.cache_uri)
        tuned_folder = _tuned_folder(settings, Path(scratch) / "tuned")
        # The tuned model's own tokenizer is the base's: training adds no token.
        tokenizer = models.load_tokenizer(base_folder)
        examples = data.encode_all(tokenizer, rows, plan.optimization.sequence_length)
        asked = [row for row in rows if row.prompt is not None][: settings.generations]

        def answers(load: Callable[[], Any]) -> Answers:
            return _answers(load, plan, settings, rank, reporter, tokenizer, examples, asked)

        base = answers(lambda: models.load_model(base_folder, plan.model))
        tuned = answers(lambda: models.load_finished(tuned_folder, plan.model, plan.cache_uri))
    if not rank.is_first:
        return {}
    samples = [
        Sample(prompt=row.prompt or "", reference=row.completion, base=before, tuned=after)
        for row, before, after in zip(asked, base.texts, tuned.texts, strict=True)
    ]
    metrics = compare(base.loss, tuned.loss)
    reporter.update(phase="logging", eval_loss=tuned.loss)
    tracker.log_metrics(metrics, step=0)
    wire = [asdict(sample) for sample in samples]
    tracker.log_texts(
        {
            "evaluation/generations.md": markdown(metrics, samples),
            "evaluation/generations.json": json.dumps(wire, indent=2, ensure_ascii=False),
        }
    )
    tracker.close()
    return {"metrics": metrics, "samples": wire, "rows": len(examples), "tuned_uri": settings.tuned_uri}


def compare(base_loss: float, tuned_loss: float) -> dict[str, float]:
    """The metrics of both models; ``perplexity_ratio`` below 1 means that tuning helped."""
    base_perplexity, tuned_perplexity = heldout.perplexity(base_loss), heldout.perplexity(tuned_loss)
    return {
        "base_loss": base_loss,
        "base_perplexity": base_perplexity,
        "tuned_loss": tuned_loss,
        "tuned_perplexity": tuned_perplexity,
        # From the losses, so that two perplexities too large for a double still compare.
        "perplexity_ratio": heldout.perplexity(tuned_loss - base_loss),
    }


def markdown(metrics: dict[str, float], samples: Sequence[Sample]) -> str:
    """The comparison as a page to read."""
    lines = [
        "# Base and tuned model on held-out rows",
        "",
        "| | base | tuned |",
        "| --- | --- | --- |",
        f"| loss per token | {metrics['base_loss']:.4f} | {metrics['tuned_loss']:.4f} |",
        f"| perplexity | {metrics['base_perplexity']:.2f} | {metrics['tuned_perplexity']:.2f} |",
    ]
    for number, sample in enumerate(samples, start=1):
        lines += ["", f"## {number}. Prompt", "", _quoted(sample.prompt)]
        for title, text in (("Reference", sample.reference), ("Base", sample.base), ("Tuned", sample.tuned)):
            lines += ["", f"**{title}**", "", _quoted(text)]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in (text.splitlines() or [""]))


def _answers(
    load: Callable[[], Any],
    plan: TrainingPlan,
    settings: EvaluationSettings,
    rank: Rank,
    reporter: Reporter,
    tokenizer: Any,
    examples: list[data.Example],
    asked: list[data.Row],
) -> Answers:
    reporter.update(phase="loading")
    model = load().to(rank.device)
    reporter.update(phase="evaluating")
    batches = data.heldout_batches(
        examples, batch_size=plan.optimization.micro_batch_size, rank=rank.rank, world_size=rank.world_size
    )
    loss = heldout.mean_loss(model, batches, pad_token_id=tokenizer.pad_token_id, device=rank.device)
    texts: list[str] = []
    if rank.is_first:
        reporter.update(phase="generating")
        texts = [_continue(model, tokenizer, row, settings, rank) for row in asked]
    # The next model needs this one's memory.
    del model
    gc.collect()
    return Answers(loss=loss, texts=texts)


def _continue(model: Any, tokenizer: Any, row: data.Row, settings: EvaluationSettings, rank: Rank) -> str:
    """The model's greedy answer to one prompt, without special tokens."""
    import torch

    ids = data.encode_prompt(tokenizer, row.prompt or "")
    batch = torch.tensor([ids], dtype=torch.long, device=rank.device)
    with torch.no_grad():
        output = model.generate(
            input_ids=batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=settings.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(output[0, batch.shape[1] :], skip_special_tokens=True)).strip()


def _tuned_folder(settings: EvaluationSettings, cache: Path) -> Path:
    problem = (
        f"evaluation.tuned_uri = {settings.tuned_uri!r}: there is no saved model. "
        "It must be the model_uri of a fine-tune's result, readable by every rank."
    )
    try:
        folder = storage.local_folder(settings.tuned_uri, cache)
    except OSError as error:
        raise InputError(problem) from error
    if not (folder / "config.json").exists() and not models.is_adapter(folder):
        raise InputError(problem)
    return folder
