# SPDX-License-Identifier: Apache-2.0
"""Cleaning, de-duplicating and splitting rows, as Spark expressions over ``prompt`` and ``completion``.

Every result depends on the rows' content alone: not on their order, their partitions or the cluster.
"""

from __future__ import annotations

import math
import unicodedata
from typing import TYPE_CHECKING, Any

from .spark_kinds import functions_for

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Line indentation is content (code), so runs of blanks inside a line stay as they are.
_REPLACEMENTS = (
    (r"\r\n?|[\u000B\u000C\u0085\u2028\u2029]", "\n"),
    (r"[\u00A0\u1680\u2000-\u200A\u202F\u205F\u3000]", " "),
    # Control characters, byte order marks, soft hyphens. Joiners stay: emoji and several scripts need them.
    (r"[\u0000-\u0008\u000E-\u001F\u007F\u00AD\u200B\u2060\uFEFF]", ""),
    (r"[ \t]+\n", "\n"),
    (r"\n{3,}", "\n\n"),
    (r"\A\s+|\s+\z", ""),
)
_SCORE_HEX_DIGITS = 13  # 52 bits: exact in a double


def nfc(text: str | None) -> str | None:
    """Composed Unicode, so that equal text has equal bytes. Runs in the cluster's Python workers."""
    return None if text is None else unicodedata.normalize("NFC", text)


def judge(rows: DataFrame, *, needs_prompt: bool, max_characters: int) -> DataFrame:
    """Clean ``prompt`` and ``completion``; ``verdict`` is ``kept``, ``empty`` or ``too_long``.

    Args:
        rows: string columns ``prompt`` (null throughout when the data is plain text) and ``completion``.
        needs_prompt: whether a row without a prompt counts as empty.
        max_characters: at most so many in prompt and completion together.
    """
    F = functions_for(rows)
    cleaned = rows.select(
        _clean_text(F, F.col("prompt")).alias("prompt"), _clean_text(F, F.col("completion")).alias("completion")
    )
    characters = F.char_length("completion") + F.coalesce(F.char_length("prompt"), F.lit(0))
    empty = F.coalesce(F.col("completion"), F.lit("")) == ""
    if needs_prompt:
        empty = empty | (F.coalesce(F.col("prompt"), F.lit("")) == "")
    verdict = F.when(empty, "empty").when(characters > max_characters, "too_long").otherwise("kept")
    return cleaned.withColumn("verdict", verdict)


def _clean_text(F: Any, text: Column) -> Column:
    from pyspark.sql.types import StringType

    composed: Any = F.udf(nfc, StringType(), useArrow=False)
    cleaned: Column = composed(text)
    for pattern, replacement in _REPLACEMENTS:
        cleaned = F.regexp_replace(cleaned, pattern, replacement)
    return cleaned


def distinct(rows: DataFrame) -> DataFrame:
    """One row for each prompt and completion that differ in more than white space; the least one stands."""
    F = functions_for(rows)
    key = F.sha2(F.to_json(F.struct(_squeezed(F, "prompt").alias("p"), _squeezed(F, "completion").alias("c"))), 256)
    chosen = rows.groupBy(key.alias("key")).agg(F.min(F.struct("prompt", "completion")).alias("row"))
    return chosen.select("key", "row.prompt", "row.completion")


def scored(rows: DataFrame, salt: str) -> DataFrame:
    """Adds ``score`` in [0, 1): the first 52 bits of SHA-256 of salt, line feed and normalised completion.

    Equal answers, whatever their case and white space, have equal scores and so share a split: an
    answer that was trained on is never asked for in the evaluation.
    """
    F = functions_for(rows)
    digest = F.sha2(F.concat(F.lit(f"{salt}\n"), F.lower(_squeezed(F, "completion"))), 256)
    number = F.conv(F.substring(digest, 1, _SCORE_HEX_DIGITS), 16, 10).cast("bigint")
    return rows.withColumn("score", number.cast("double") / F.lit(float(16**_SCORE_HEX_DIGITS)))


def heldout_threshold(fraction: float, lowest: float, highest: float) -> float:
    """Rows that score below it are held out: ``fraction``, moved only so far that no split is empty.

    Raises:
        ValueError: all rows have one score, so that they cannot be split.
    """
    if lowest == highest:
        raise ValueError("every row has the same completion")
    if lowest >= fraction:
        return math.nextafter(lowest, 1.0)
    return highest if highest < fraction else fraction


def _squeezed(F: Any, column: str) -> Column:
    squeezed: Column = F.regexp_replace(F.col(column), r"\s+", " ")
    return squeezed
