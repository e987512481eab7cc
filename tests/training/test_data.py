# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deepspeed_provider.training import data
from deepspeed_provider.training.data import Example, Row
from deepspeed_provider.training.failures import InputError
from hypothesis import given, settings
from hypothesis import strategies as st


def text_of(tokenizer: Any, example: Example) -> tuple[str, str]:
    """What is given and what is learnt, as text."""
    given_ids, learnt_ids = example.token_ids[: example.prompt_length], example.token_ids[example.prompt_length :]
    return tokenizer.decode(given_ids), tokenizer.decode(learnt_ids)


def numbered(count: int) -> list[Example]:
    return [Example(token_ids=(n, n + 1), prompt_length=0) for n in range(count)]


@pytest.mark.parametrize(
    ("templated", "row", "expected"),
    [
        pytest.param(
            True,
            Row(prompt="Hi?", completion="Yes."),
            ("<|user|>Hi?<|end|><|assistant|>", "Yes.<|end|>"),
            id="chat template",
        ),
        pytest.param(True, Row(prompt=None, completion="Text."), ("", "Text.<|end|>"), id="text, template unused"),
        pytest.param(False, Row(prompt="Hi? ", completion="Yes."), ("Hi? ", "Yes.<|end|>"), id="plain concatenation"),
        pytest.param(False, Row(prompt=None, completion="Text."), ("", "Text.<|end|>"), id="text"),
    ],
)
def test_loss_is_on_the_completion_only(
    tokenizer: Any, plain_tokenizer: Any, templated: bool, row: Row, expected: tuple[str, str]
) -> None:
    chosen = tokenizer if templated else plain_tokenizer
    assert text_of(chosen, data.encode(chosen, row, 64)) == expected


def test_generation_is_asked_as_training_was(tokenizer: Any) -> None:
    example = data.encode(tokenizer, Row(prompt="Hi?", completion="Yes."), 64)
    assert tuple(data.encode_prompt(tokenizer, "Hi?")) == example.token_ids[: example.prompt_length]


@given(prompt=st.integers(0, 40), completion=st.integers(1, 40), length=st.integers(2, 32))
def test_truncation_keeps_the_answer_and_what_stands_next_to_it(prompt: int, completion: int, length: int) -> None:
    prompt_ids, completion_ids = list(range(100, 100 + prompt)), list(range(500, 500 + completion))
    example = data._truncate(prompt_ids, completion_ids, length)
    kept_prompt, kept_completion = (
        example.token_ids[: example.prompt_length],
        example.token_ids[example.prompt_length :],
    )
    assert len(example.token_ids) == min(length, prompt + completion)
    assert len(kept_completion) >= min(completion, length // 2) >= 1
    assert list(kept_completion) == completion_ids[: len(kept_completion)]
    assert list(kept_prompt) == prompt_ids[prompt - len(kept_prompt) :]


def test_rows_without_anything_to_learn_are_dropped(plain_tokenizer: Any) -> None:
    rows = [Row(prompt=None, completion="a"), Row(prompt=None, completion="abc def")]
    assert len(data.encode_all(plain_tokenizer, rows, 64)) == 2
    with pytest.raises(InputError, match="sequence_length = 1"):
        data.encode_all(plain_tokenizer, rows, 1)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    world=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_an_epoch_sees_every_row_and_ranks_keep_step(
    rows: int, micro: int, accumulation: int, world: int, seed: int
) -> None:
    steps = data.steps_per_epoch(rows, micro * accumulation * world)

    def epoch_of(rank: int, ranks: int, size: int) -> list[list[Example]]:
        batches = data.micro_batches(
            numbered(rows), micro_batch_size=size, accumulation=accumulation, rank=rank, world_size=ranks, seed=seed
        )
        return list(itertools.islice(batches, steps * accumulation))

    shares = [epoch_of(rank, world, micro) for rank in range(world)]
    assert all(len(batch) == micro for share in shares for batch in share)
    seen = Counter(example for share in shares for batch in share for example in batch)
    assert set(seen) == set(numbered(rows))
    assert sum(seen.values()) == steps * micro * accumulation * world
    # One rank with the whole micro batch sees the same rows in the same order.
    alone = [example for batch in epoch_of(0, 1, micro * world) for example in batch]
    together = [example for batches in zip(*shares, strict=True) for batch in batches for example in batch]
    assert alone == together


def test_order_changes_with_epoch_and_seed_only() -> None:
    def first_two_epochs(seed: int) -> list[list[Example]]:
        batches = data.micro_batches(numbered(12), micro_batch_size=12, accumulation=1, rank=0, world_size=1, seed=seed)
        return list(itertools.islice(batches, 2))

    assert first_two_epochs(1) == first_two_epochs(1)
    assert first_two_epochs(1) != first_two_epochs(2)
    assert first_two_epochs(1)[0] != first_two_epochs(1)[1]


@given(rows=st.integers(1, 30), size=st.integers(1, 5), world=st.integers(1, 5))
def test_heldout_shares_are_even_in_batches_and_whole_in_rows(rows: int, size: int, world: int) -> None:
    shares = [
        data.heldout_batches(numbered(rows), batch_size=size, rank=rank, world_size=world) for rank in range(world)
    ]
    assert len({len(share) for share in shares}) == 1
    found = [example for share in shares for batch in share for example in batch]
    assert sorted(found, key=lambda example: example.token_ids) == numbered(rows)


def test_collate_pads_to_the_longest_and_masks_prompt_and_padding() -> None:
    batch = data.collate(
        [Example(token_ids=(5, 6, 7), prompt_length=1), Example(token_ids=(8, 9), prompt_length=0)], 0, "cpu"
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, 9, -100]]
    empty = data.collate([], 3, "cpu")
    assert empty["labels"].tolist() == [[-100, -100]]


def test_read_rows(tmp_path: Path, tiny_dataset: Path) -> None:
    rows = data.read_rows(str(tiny_dataset), "heldout", tmp_path)
    assert len(rows) == 9
    assert rows[0] == Row(prompt="What is 48 plus one?", completion="It is 49.")
    assert rows[2].prompt is None
    assert data.read_rows(tiny_dataset.as_uri(), "heldout", tmp_path, limit=2) == rows[:2]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        pytest.param(None, "no readable Parquet", id="missing folder"),
        pytest.param({"text": ["a"]}, "prompt", id="other columns"),
        pytest.param({"prompt": ["a"], "completion": [""]}, "no row with a completion", id="nothing to learn"),
    ],
)
def test_unusable_data_is_one_clear_sentence(tmp_path: Path, table: dict | None, message: str) -> None:
    if table is not None:
        (tmp_path / "train").mkdir()
        pq.write_table(pa.table(table), tmp_path / "train" / "part.parquet")
    with pytest.raises(InputError, match=message) as caught:
        data.read_rows(str(tmp_path), "train", tmp_path / "cache")
    assert f"dataset_uri = '{tmp_path}'" in str(caught.value)
