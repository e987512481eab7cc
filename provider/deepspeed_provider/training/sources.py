# SPDX-License-Identifier: Apache-2.0
"""Where rows come from: a user's own files, or the docstrings of what the cluster has installed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import corpus
from .failures import InputError
from .spark_kinds import conditions, first_line, functions_for, spark_errors

if TYPE_CHECKING:
    import pandas
    from pyspark.sql import Column, DataFrame, SparkSession

DOCSTRINGS = "docstrings"

_KINDS = {
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "json",
    "parquet": "parquet",
    "pq": "parquet",
    "csv": "csv",
    "tsv": "tsv",
}
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("input", "output"),
)
_TEXTS = ("text", "content", "completion")
_USABLE = "prompt and completion, question and answer, instruction and output (input optional), or text"
_CORRUPT = "_corrupt_record"
_UNREADABLE = ("FAILED_READ_FILE", "CANNOT_READ_FILE_FOOTER", "UNABLE_TO_INFER_SCHEMA", "CANNOT_MERGE_SCHEMA")


class DatasetError(InputError):
    """The data cannot be used; says which setting, what was found and what would work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns hold the rows. ``context`` is Alpaca's optional ``input``, put below the prompt."""

    completion: str
    prompt: str | None = None
    context: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What lies at a URI: one kind of file, and a state that changes when any file does."""

    kind: str
    state: str


def list_files(spark: SparkSession, uri: str) -> Files:
    """Looks at names, sizes and times only. Raises DatasetError when nothing usable is there."""
    F = functions_for(spark)
    listing = spark.read.format("binaryFile").option("recursiveFileLookup", True)
    suffix = F.regexp_extract(F.lower("path"), r"\.([a-z0-9]+)(?:\.(?:gz|bz2|zst))?$", 1)
    try:
        found = (
            listing.load(uri)
            .select("path", "length", "modificationTime", suffix.alias("suffix"))
            .groupBy("suffix")
            .agg(F.count("path"), F.sum("length"), F.bit_xor(F.xxhash64("path", "length", "modificationTime")))
            .collect()
        )
    except spark_errors() as error:
        if "PATH_NOT_FOUND" in conditions(error):
            raise DatasetError(f"source = {uri!r}: the cluster finds no such file or folder.") from error
        raise
    suffixes = sorted(row[0] for row in found)
    kinds = {_KINDS.get(suffix, "") for suffix in suffixes}
    if not suffixes:
        raise DatasetError(f"source = {uri!r}: holds no file with content.")
    if "" in kinds or len(kinds) > 1:
        names = ", ".join(f".{suffix}" if suffix else "files without a suffix" for suffix in suffixes)
        raise DatasetError(f"source = {uri!r}: holds {names}; give files of one kind of .jsonl, .json, .parquet, .csv.")
    return Files(kind=kinds.pop(), state=json.dumps(sorted([str(value) for value in row] for row in found)))


def read_files(spark: SparkSession, uri: str, kind: str) -> DataFrame:
    """All columns of the files; JSON and CSV values as strings. Raises DatasetError for broken files."""
    reader = spark.read.option("recursiveFileLookup", True)
    try:
        if kind == "parquet":
            frame = reader.parquet(uri)
        elif kind in ("csv", "tsv"):
            # RFC 4180: quotes are doubled inside quotes, and a quoted value may span lines.
            separator = "," if kind == "csv" else "\t"
            frame = reader.csv(uri, header=True, sep=separator, multiLine=True, quote='"', escape='"')
        else:
            whole = kind == "json" and _is_one_document(spark, uri)
            frame = reader.json(uri, multiLine=whole, primitivesAsString=True, columnNameOfCorruptRecord=_CORRUPT)
        names = frame.columns
    except spark_errors() as error:
        if any(condition.startswith(_UNREADABLE) for condition in conditions(error)):
            raise DatasetError(f"source = {uri!r}: cannot be read as {kind}: {first_line(error)}") from error
        raise
    if _CORRUPT in names:
        _refuse_broken_json(frame, uri)
    # A byte order mark, as spreadsheets write it, sticks to the first header.
    return frame.toDF(*(name.removeprefix("\ufeff").strip() for name in names))


def _is_one_document(spark: SparkSession, uri: str) -> bool:
    """Whether ``.json`` files hold one array or object each, rather than one object a line."""
    F = functions_for(spark)
    lines = spark.read.option("recursiveFileLookup", True).text(uri)
    first = lines.where(F.length(F.trim("value")) > 0).first()
    if first is None:
        return False
    try:
        return not isinstance(json.loads(first[0]), dict)
    except ValueError:
        return True


def _refuse_broken_json(frame: DataFrame, uri: str) -> None:
    F = functions_for(frame)
    broken = None
    if frame.columns == [_CORRUPT]:
        raise DatasetError(f"source = {uri!r}: no line is a JSON object.")
    broken = frame.where(F.col(_CORRUPT).isNotNull()).first()
    if broken is not None:
        raise DatasetError(f"source = {uri!r}: not every line is a JSON object, for example {broken[_CORRUPT][:80]!r}.")


def choose_columns(
    found: dict[str, str], *, prompt: str | None = None, completion: str | None = None, text: str | None = None
) -> Columns:
    """The columns named by the user, else the first known pair, else a known text column.

    Args:
        found: Spark type by column name.

    Raises:
        DatasetError: none fits; the message names those found and what would work.
    """
    if text and (prompt or completion):
        raise DatasetError("text_column excludes prompt_column and completion_column: give one or the other.")
    if prompt and not completion:
        raise DatasetError(f"prompt_column = {prompt!r}: completion_column is needed beside it.")
    if completion or text:
        answer = _existing("completion_column" if completion else "text_column", completion or text or "", found)
        return Columns(prompt=_existing("prompt_column", prompt, found) if prompt else None, completion=answer)
    names = {name.lower(): name for name in found if _is_text(found[name])}
    for first, second in _PAIRS:
        if first in names and second in names:
            context = names.get("input") if first == "instruction" else None
            return Columns(prompt=names[first], completion=names[second], context=context)
    for name in _TEXTS:
        if name in names:
            return Columns(completion=names[name])
    listed = ", ".join(f"{name} ({kind})" for name, kind in found.items()) or "none"
    raise DatasetError(f"no usable columns: found {listed}. Name them, or use text columns {_USABLE}.")


def _existing(setting: str, name: str, found: dict[str, str]) -> str:
    matches = [known for known in found if known.lower() == name.lower()]
    if not matches:
        near = difflib.get_close_matches(name, found, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(found)}."
        raise DatasetError(f"{setting} = {name!r}: there is no such column. {hint}")
    chosen = name if name in matches else matches[0]
    if not _is_text(found[chosen]):
        raise DatasetError(f"{setting} = {name!r}: holds {found[chosen]}, but text is needed.")
    return chosen


def _is_text(kind: str) -> bool:
    return not kind.startswith(("array", "struct", "map", "binary", "variant"))


def select_rows(frame: DataFrame, columns: Columns) -> DataFrame:
    """``prompt`` (null for plain text) and ``completion`` as strings."""
    F = functions_for(frame)

    def text(name: str) -> Column:
        column: Column = F.col("`" + name.replace("`", "``") + "`").cast("string")
        return column

    prompt = text(columns.prompt) if columns.prompt else F.lit(None).cast("string")
    if columns.context:
        context = F.nullif(F.trim(text(columns.context)), F.lit(""))
        prompt = F.when(context.isNull(), prompt).otherwise(F.concat_ws("\n\n", prompt, context))
    return frame.select(prompt.alias("prompt"), text(columns.completion).alias("completion"))


def read_docstrings(spark: SparkSession, modules: Sequence[str]) -> DataFrame:
    """``library``, ``prompt``, ``completion``, and ``skipped``: a JSON object on one row of each library.

    One task for each library. The code of ``training`` must have been shipped to the session.
    """
    grouped = list(corpus.libraries(modules).items())

    def rows(batches: Iterator[pandas.DataFrame]) -> Iterator[pandas.DataFrame]:
        import pandas

        for batch in batches:
            for number in batch["id"]:
                yield pandas.DataFrame(
                    _library_rows(*grouped[number]), columns=["library", "prompt", "completion", "skipped"]
                )

    tasks = spark.range(0, len(grouped), 1, len(grouped))
    return tasks.mapInPandas(rows, "library string, prompt string, completion string, skipped string")


def _library_rows(library: str, modules: Sequence[str]) -> list[tuple[Any, ...]]:
    extraction = corpus.extract(library, modules)
    pairs = [(library, pair.prompt, pair.completion, None) for pair in extraction.pairs]
    return [*pairs, (library, None, None, json.dumps(dict(extraction.skipped)))]
