# SPDX-License-Identifier: Apache-2.0
"""Reading what ranks wrote, and what they half wrote."""

from __future__ import annotations

import json

import pytest
from deepspeed_provider.errors import FailureKind
from deepspeed_provider.runs import evidence
from deepspeed_provider.testing.run_scripts import failure_file
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"phase": "loading", "time": 1.0, "step": 0, "total_steps": 0, "loss": None}, "loading"),
        (
            {
                "phase": "training",
                "time": 1.0,
                "step": 12,
                "total_steps": 60,
                "loss": 2.34567,
                "learning_rate": 4.9e-4,
                "tokens_per_second": 312.4,
                "peak_memory_bytes": 2 * 2**30,
                "eval_loss": None,
                "a_field_of_tomorrow": 1,
            },
            "training, step 12/60, loss 2.3457, learning rate 0.00049, 312 tokens/s, peak memory 2.00 GiB",
        ),
    ],
    ids=["loading", "training"],
)
def test_progress_line(record: dict, line: str) -> None:
    assert str(evidence.read_progress([json.dumps(record)])) == line


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"step": 3}', '{"phase": 3}'], ids=repr)
def test_a_half_written_progress_is_no_news(text: str) -> None:
    assert evidence.read_progress([text]) is None


def test_a_result_belongs_to_its_token() -> None:
    texts = ['{"token": "other", "x": 1}', "{", '{"token": "mine", "x": 2}']
    assert evidence.read_result(texts, "mine") == {"token": "mine", "x": 2}
    assert evidence.read_result(texts, "nobody's") is None


def test_a_second_start_is_an_echo_of_the_first() -> None:
    found = evidence.cause(
        {
            "a": failure_file(0, "UNKNOWN", 1.0, "second start", type="AlreadyStarted"),
            "b": failure_file(1, "HOST_OOM", 9.0),
        }
    )
    assert found is not None
    assert (found.kind, found.rank) == (FailureKind.HOST_OOM, 1)


def test_an_unknown_kind_is_unknown() -> None:
    found = evidence.cause({"a": failure_file(0, "COSMIC_RAY", 1.0)})
    assert found is not None
    assert found.kind is FailureKind.UNKNOWN


@given(st.dictionaries(st.text(), st.text() | st.from_regex(r'\{"kind": "[A-Z]+"(, "time": (1|"x"|null))?\}')))
def test_any_text_is_judged_without_an_exception(files: dict[str, str]) -> None:
    evidence.cause(files)
    evidence.read_progress(files.values())
    evidence.read_result(files.values(), "t")
