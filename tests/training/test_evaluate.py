# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import pytest
from deepspeed_provider.training.evaluate import Sample, compare, markdown
from deepspeed_provider.training.heldout import local_loss, perplexity, summed_loss


def test_compare() -> None:
    metrics = compare(3.0, 2.0)
    assert metrics["base_perplexity"] == pytest.approx(math.exp(3))
    assert metrics["perplexity_ratio"] == pytest.approx(math.exp(-1))
    huge = compare(800.0, 799.0)
    assert huge["base_perplexity"] == math.inf
    assert huge["perplexity_ratio"] == pytest.approx(math.exp(-1))
    assert perplexity(0) == 1


def test_markdown_shows_both_answers_and_the_reference() -> None:
    page = markdown(compare(3.0, 2.0), [Sample(prompt="Why?\nSay.", reference="Because.", base="", tuned="So.")])
    assert "| perplexity | 20.09 | 7.39 |" in page
    for part in ("> Why?\n> Say.", "**Reference**\n\n> Because.", "**Base**\n\n>\n", "**Tuned**\n\n> So."):
        assert part in page


def test_summed_loss_equals_the_models_own_mean_on_equal_tokens(tiny_model: Any) -> None:
    import torch
    from deepspeed_provider.training.data import Example
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    examples = [Example(token_ids=(5, 6, 7, 8, 9), prompt_length=2), Example(token_ids=(9, 8), prompt_length=0)]
    total, tokens = local_loss(model, [examples, []], pad_token_id=0, device="cpu")
    assert tokens == 4
    separate = 0.0
    for example in examples:
        ids = torch.tensor([example.token_ids])
        labels = ids.clone()
        labels[:, : example.prompt_length] = -100
        count = len(example.token_ids) - max(1, example.prompt_length)
        separate += float(model(input_ids=ids, labels=labels).loss.detach()) * count
    assert total == pytest.approx(separate, rel=1e-5)
    assert summed_loss(torch.zeros(1, 2, 3), torch.full((1, 2), -100)) == (0.0, 0)
