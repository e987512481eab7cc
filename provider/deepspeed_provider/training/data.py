# SPDX-License-Identifier: Apache-2.0
"""Prompt and completion rows from Parquet, as batches of tokens.

Row order is a function of seed and epoch alone: a global batch holds the same rows however many
ranks share it, so another world size of equal effective batch size trains on the same sequence.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import storage
from .failures import InputError

IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy's default ignore_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question and its answer as text; ``prompt`` None means plain text to continue."""

    prompt: str | None
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One sequence. ``prompt_length`` tokens at the start carry no loss."""

    token_ids: tuple[int, ...]
    prompt_length: int

    @property
    def trainable_tokens(self) -> int:
        """Tokens with a loss; the very first has nothing to be predicted from."""
        return len(self.token_ids) - max(self.prompt_length, 1)


def read_rows(dataset_uri: str, split: str, cache: Path, limit: int | None = None) -> list[Row]:
    """The rows of one split (``train`` or ``heldout``), in file order. Raises InputError when there are none."""
    import pyarrow
    import pyarrow.parquet

    uri = storage.join(dataset_uri, split)
    try:
        folder = storage.local_folder(uri, cache / split)
        table = pyarrow.parquet.read_table(folder, columns=["prompt", "completion"])
    except (OSError, pyarrow.ArrowInvalid, KeyError) as error:
        raise InputError(
            f"dataset_uri = {dataset_uri!r}: no readable Parquet with the columns 'prompt' and 'completion' "
            f"in {uri} ({error}). It must be a folder that the data preparation wrote and every rank can read."
        ) from error
    if set(table.column_names) != {"prompt", "completion"}:
        raise InputError(
            f"dataset_uri = {dataset_uri!r}: {uri} has the columns {table.column_names}. "
            "It needs 'prompt' (may be null) and 'completion'."
        )
    table = table.slice(0, limit)
    rows = [
        Row(prompt=prompt, completion=completion)
        for prompt, completion in zip(table["prompt"].to_pylist(), table["completion"].to_pylist(), strict=True)
        if completion
    ]
    if not rows:
        raise InputError(f"dataset_uri = {dataset_uri!r}: {uri} holds no row with a completion. Prepare more data.")
    return rows


def prompt_text(tokenizer: Any, prompt: str) -> str:
    """``prompt`` as the model's chat template puts a question, ready for the answer; itself without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return prompt
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids that a model continues with its answer to ``prompt``, exactly as in training."""
    if getattr(tokenizer, "chat_template", None):
        return _ids(tokenizer, prompt_text(tokenizer, prompt))
    return _opening_ids(tokenizer) + _ids(tokenizer, prompt)


def encode(tokenizer: Any, row: Row, sequence_length: int) -> Example:
    """``row`` in at most ``sequence_length`` tokens, its end marked with the end-of-sequence token."""
    # A chat template writes its own special tokens; plain text gets what the tokenizer begins a text with.
    prompt_ids = _opening_ids(tokenizer) if row.prompt is None else encode_prompt(tokenizer, row.prompt)
    completion_ids = _ids(tokenizer, _answer_text(tokenizer, row))
    end = tokenizer.eos_token_id
    if end is not None and completion_ids[-1:] != [end]:
        completion_ids.append(end)
    return _truncate(prompt_ids, completion_ids, sequence_length)


def encode_all(tokenizer: Any, rows: Sequence[Row], sequence_length: int) -> list[Example]:
    """Examples that have something to learn. Raises InputError when none has."""
    encoded = (encode(tokenizer, row, sequence_length) for row in rows)
    examples = [example for example in encoded if example.trainable_tokens > 0]
    if not examples:
        raise InputError(
            f"sequence_length = {sequence_length}: none of {len(rows)} rows keeps a token to learn. "
            "Use a longer sequence_length or rows with longer completions."
        )
    return examples


def steps_per_epoch(row_count: int, rows_per_step: int) -> int:
    """Optimizer steps that see every row at least once; the last one is filled from the start."""
    return -(-row_count // rows_per_step)


def micro_batches(
    examples: Sequence[Example], *, micro_batch_size: int, accumulation: int, rank: int, world_size: int, seed: int
) -> Iterator[list[Example]]:
    """This rank's micro batches, without end: epoch after epoch, shuffled anew by seed and epoch."""
    rows_per_step = micro_batch_size * accumulation * world_size
    epoch = 0
    while True:
        order = list(range(len(examples)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for step in range(steps_per_epoch(len(order), rows_per_step)):
            for part in range(accumulation):
                start = step * rows_per_step + (part * world_size + rank) * micro_batch_size
                yield [examples[order[(start + row) % len(order)]] for row in range(micro_batch_size)]
        epoch += 1


def heldout_batches(examples: Sequence[Example], *, batch_size: int, rank: int, world_size: int) -> list[list[Example]]:
    """This rank's share of ``examples``. All ranks get the same number of batches, the last ones maybe empty:
    at ZeRO stage 3 every forward pass is a collective."""
    share = list(examples[rank::world_size])
    largest = -(-len(examples) // world_size)
    return [share[start : start + batch_size] for start in range(0, largest, batch_size)]


def collate(examples: Sequence[Example], pad_token_id: int, device: str) -> dict[str, Any]:
    """Tensors ``input_ids``, ``attention_mask``, ``labels``, each (rows, longest), padded at the right.

    No examples give one row of two padding tokens without labels: a forward pass that counts for nothing.
    """
    import torch

    length = max((len(example.token_ids) for example in examples), default=2)
    ids, mask, labels = [], [], []
    for example in examples:
        padding = length - len(example.token_ids)
        ids.append([*example.token_ids, *[pad_token_id] * padding])
        mask.append([1] * len(example.token_ids) + [0] * padding)
        target = [IGNORED_LABEL] * example.prompt_length + list(example.token_ids[example.prompt_length :])
        labels.append(target + [IGNORED_LABEL] * padding)
    if not examples:
        ids, mask, labels = [[pad_token_id] * length], [[1] * length], [[IGNORED_LABEL] * length]
    columns = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: torch.tensor(values, dtype=torch.long, device=device) for name, values in columns.items()}


def _answer_text(tokenizer: Any, row: Row) -> str:
    """The completion as the chat template puts an answer, end mark included; itself without a template."""
    if row.prompt is None or not getattr(tokenizer, "chat_template", None):
        return row.completion
    question = prompt_text(tokenizer, row.prompt)
    messages = [{"role": "user", "content": row.prompt}, {"role": "assistant", "content": row.completion}]
    dialogue = str(tokenizer.apply_chat_template(messages, tokenize=False))
    if not dialogue.startswith(question):
        return row.completion  # a template that rewrites earlier turns
    return dialogue.removeprefix(question).rstrip()


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _opening_ids(tokenizer: Any) -> list[int]:
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and tokenizer("")["input_ids"][:1] == [begin] else []


def _truncate(prompt_ids: list[int], completion_ids: list[int], sequence_length: int) -> Example:
    """At least half of the sequence is kept for the completion; a long prompt loses its beginning, since
    what stands next to the answer matters most."""
    room = max(sequence_length - len(prompt_ids), sequence_length // 2)
    completion_ids = completion_ids[:room]
    kept = prompt_ids[max(0, len(prompt_ids) - (sequence_length - len(completion_ids))) :]
    return Example(token_ids=(*kept, *completion_ids), prompt_length=len(kept))
