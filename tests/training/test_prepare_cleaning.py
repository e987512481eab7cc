"""Cleaning and splitting: Spark expressions against the same rules written in plain Python."""

from __future__ import annotations

import hashlib
import re

import pytest
from deepspeed_provider.training.cleaning import distinct, heldout_threshold, judge, scored
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SCHEMA = "prompt string, completion string"


def score_in_python(completion, salt):
    normalised = re.sub(r"[ \t\n\r\f\v]+", " ", completion).lower()
    return int(hashlib.sha256(f"{salt}\n{normalised}".encode()).hexdigest()[:13], 16) / 16**13


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        pytest.param("  caf\u0065\u0301\u00a0au lait ", "café au lait", id="composed, no-break space, trimmed"),
        pytest.param("one\r\ntwo\rthree\u2028four", "one\ntwo\nthree\nfour", id="line ends"),
        pytest.param("a  \n\n\n\n    b = 1\t\n", "a\n\n    b = 1", id="blank lines and line tails, not indentation"),
        pytest.param("\ufeffx\u200by\u00adz\x07\x00", "xyz", id="invisible characters"),
        pytest.param("👨\u200d👩\u200d👧 می\u200cخواهم", "👨\u200d👩\u200d👧 می\u200cخواهم", id="joiners stay"),
        pytest.param("東京\u3000タワー", "東京 タワー", id="ideographic space"),
    ],
)
def test_text_is_cleaned(spark, raw, clean):
    rows = spark.createDataFrame([(raw, raw)], SCHEMA)
    assert tuple(judge(rows, needs_prompt=True, max_characters=100).first()) == (clean, clean, "kept")


def test_verdicts(spark):
    rows = [("q", "a"), ("q", " \n\u00a0"), ("q", None), (None, "a"), (" ", "a"), ("1234", "12345"), ("1234", "123456")]
    frame = spark.createDataFrame(rows, SCHEMA)
    judged = judge(frame, needs_prompt=True, max_characters=9).collect()
    assert [row.verdict for row in judged] == ["kept", "empty", "empty", "empty", "empty", "kept", "too_long"]
    plain = judge(frame, needs_prompt=False, max_characters=9).collect()
    assert [row.verdict for row in plain] == ["kept", "empty", "empty", "kept", "kept", "kept", "too_long"]


def test_duplicates_differ_in_white_space_only(spark):
    rows = [("q", "a  b"), ("q", "a b"), ("q", "a\nb"), ("q", "A b"), (None, "a b"), (None, "a b"), ("q a", "b")]
    kept = {(row.prompt, row.completion) for row in distinct(spark.createDataFrame(rows, SCHEMA)).collect()}
    assert kept == {("q", "a\nb"), ("q", "A b"), (None, "a b"), ("q a", "b")}


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(
        st.text("abcXYZ äéß東京🚉 \n\t'\"\\", min_size=1, max_size=12), min_size=1, max_size=30, unique=True
    ),
    salt=st.text("ab\n", max_size=3),
    order=st.randoms(use_true_random=False),
    partitions=st.integers(1, 5),
)
def test_scores_depend_on_content_alone(spark, texts, salt, order, partitions):
    shuffled = texts * 2
    order.shuffle(shuffled)
    frame = spark.createDataFrame([(None, text) for text in shuffled], SCHEMA).repartition(partitions)
    scores = {(row.completion, row.score) for row in scored(frame, salt).collect()}
    assert scores == {(text, score_in_python(text, salt)) for text in texts}


@given(
    fraction=st.floats(0.001, 0.999),
    scores=st.lists(st.floats(0, 1, exclude_max=True), min_size=2, unique=True),
)
def test_no_split_is_ever_empty(fraction, scores):
    threshold = heldout_threshold(fraction, min(scores), max(scores))
    heldout = [score for score in scores if score < threshold]
    assert 0 < len(heldout) < len(scores)
    if min(scores) < fraction <= max(scores):
        assert threshold == fraction


def test_equal_scores_cannot_be_split():
    with pytest.raises(ValueError, match="same completion"):
        heldout_threshold(0.1, 0.5, 0.5)
