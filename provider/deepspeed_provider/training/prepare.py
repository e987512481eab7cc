# SPDX-License-Identifier: Apache-2.0
"""Data preparation on Spark: from a user's files or installed docstrings to a training data set.

Everything is read, cleaned and written by the cluster; the caller holds a session and opens no path
of it. A finished folder holds ``train/`` and ``heldout/`` (Parquet, ``prompt`` nullable, ``completion``)
and ``dataset.json``, which is written last: a folder without a complete one is not a data set. Rows are
written to a private folder beside them and moved into place under names that depend on the content
alone, so that two who prepare the same at once leave the same files. One that is killed leaves its
private folder (``_preparing-…``), which nobody reads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from . import cleaning, cluster_calls, code_archive, corpus, sources, storage
from .progress import Reporter
from .sources import DOCSTRINGS, DatasetError
from .spark_kinds import functions_for, spark_errors

if TYPE_CHECKING:
    import pandas
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["DOCSTRINGS", "MANIFEST", "DatasetError", "PrepareSettings", "main", "prepare", "prepare_shared"]

log = logging.getLogger(__name__)

MANIFEST = "dataset.json"
SPLITS = ("train", "heldout")
ROWS_PER_FILE = 200_000
# The code that decides about rows: another version of it makes another data set.
_DECIDING_MODULES = ("corpus.py", "docstrings.py", "sources.py", "cleaning.py", "prepare.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """What to prepare, and where to.

    Attributes:
        source: ``docstrings``, or a file or folder of JSON Lines, JSON, Parquet or CSV that Spark reads.
        output_uri: folder that Spark and the Python workers of the cluster can write.
        heldout_fraction: share of rows kept for evaluation; at least one row is.
        prompt_column, completion_column, text_column: found by their usual names when not given.
        modules: Python modules of the ``docstrings`` corpus; None takes ``corpus.DEFAULT_MODULES``.
        max_characters: rows with more in prompt and completion together are dropped.
        salt: another one gives another split.
        model_ref: model whose tokenizer counts the tokens, where the cluster can load it.
        model_revision: branch, tag or commit of a ``model_ref`` on the hub; None takes the default one.
        cache_uri: folder for converted models; needed with ``model_ref``.
    """

    source: str
    output_uri: str
    heldout_fraction: float = 0.1
    prompt_column: str | None = None
    completion_column: str | None = None
    text_column: str | None = None
    modules: tuple[str, ...] | None = None
    max_characters: int = 20_000
    salt: str = ""
    model_ref: str | None = None
    model_revision: str | None = None
    cache_uri: str | None = None

    @classmethod
    def from_json(cls, wire: Mapping[str, Any]) -> PrepareSettings:
        """What ``asdict`` has made, by way of JSON."""
        modules = wire.get("modules")
        return cls(**{**wire, "modules": None if modules is None else tuple(modules)})


def main(payload: Mapping[str, Any]) -> dict[str, Any]:
    """``prepare_shared`` in the driver's own session, by ``settings``; says in ``output_uri`` that it is at work."""
    from pyspark.sql import SparkSession

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Says each request to the JVM.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    reporter = Reporter(payload["output_uri"], clock=time.time, peak_memory=lambda: None)
    reporter.update(phase="preparing")
    manifest = prepare_shared(SparkSession.builder.getOrCreate(), PrepareSettings.from_json(payload["settings"]))
    reporter.update(phase="done")
    return manifest


def prepare_shared(spark: SparkSession, settings: PrepareSettings) -> dict[str, Any]:
    """Prepares a data set in a folder below ``settings.output_uri``; its manifest, with ``dataset_uri``.

    The folder is named by the settings, the source's content and our code: equal requests on equal data share one,
    and a data set that a running training reads is never overwritten by one prepared from an edited source.

    Raises:
        DatasetError: as ``prepare``.
    """
    _check(settings)
    cluster_calls.ship_code(spark)
    identity = [asdict(settings) | {"output_uri": ""}, _source_state(spark, settings), _code_digest()]
    folder = storage.join(settings.output_uri, _digest(identity))
    return {**prepare(spark, replace(settings, output_uri=folder)), "dataset_uri": folder}


def prepare(spark: SparkSession, settings: PrepareSettings) -> dict[str, Any]:
    """Prepares the data set, or finds it prepared from the same input by the same code.

    Args:
        spark: an open session, of Spark Connect or the driver's own. Code is added to it; the workers
            need Python of our minor version, pandas and pyarrow.

    Returns:
        The manifest: ``fingerprint`` (of the content, whatever its order), ``rows``, ``splits`` with
        rows, characters, words and tokens (None when not counted), ``skipped`` modules, ``settings``.

    Raises:
        DatasetError: the settings or the data cannot be used.
    """
    _check(settings)
    cluster_calls.ship_code(spark)
    state = _source_state(spark, settings)
    digest = _digest([asdict(settings), state, _code_digest()])
    known = cluster_calls.call(spark, _claim, settings.output_uri, digest)
    if known and not _still_there(spark, settings.output_uri, known):
        known = cluster_calls.call(spark, _claim, settings.output_uri, "")
    if known:
        log.info("Data set %s is prepared already: %s", settings.output_uri, known["fingerprint"])
        return dict(known)
    log.info("Reading %s on the cluster; the data set goes to %s", settings.source, settings.output_uri)
    private_uri = storage.join(settings.output_uri, f"_preparing-{uuid.uuid4().hex}")
    try:
        manifest = _prepare_in(private_uri, spark, settings, state, digest)
    except BaseException:
        cluster_calls.call(spark, storage.remove, private_uri)
        raise
    return dict(cluster_calls.call(spark, _publish, private_uri, settings.output_uri, manifest))


def _prepare_in(
    private_uri: str, spark: SparkSession, settings: PrepareSettings, state: dict[str, Any], digest: str
) -> dict[str, Any]:
    """Writes both splits below ``private_uri`` and returns the manifest of the data set that they make."""
    rows, skipped = _write_splits(private_uri, spark, settings, state)
    log.info("Rows: %s", ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in rows.items()))
    if skipped:
        log.info("Not read: %s", "; ".join(f"{module} ({reason})" for module, reason in skipped.items()))
    log.info("Counting words and tokens of both splits")
    splits = {split: _measure(spark, settings, storage.join(private_uri, split)) for split in SPLITS}
    return {
        "complete": True,
        "source": settings.source,
        "settings": asdict(settings) | {"modules": list(settings.modules) if settings.modules else None},
        "settings_digest": digest,
        "fingerprint": _digest({split: splits[split].pop("content") for split in SPLITS}),
        "rows": rows,
        "splits": splits,
        "skipped": skipped,
    }


def _check(settings: PrepareSettings) -> None:
    uri = settings.output_uri
    if not urlsplit(uri).scheme and not uri.startswith("/"):
        raise DatasetError(f"output_uri = {uri!r}: give an absolute path or a URI; the cluster has another folder.")
    if not 0 < settings.heldout_fraction < 1:
        raise DatasetError(f"heldout_fraction = {settings.heldout_fraction!r}: give a number between 0 and 1, as 0.1.")
    if settings.max_characters < 1:
        raise DatasetError(f"max_characters = {settings.max_characters!r}: give a positive number, as 20000.")
    if settings.model_ref and not settings.cache_uri:
        raise DatasetError(f"model_ref = {settings.model_ref!r}: cache_uri is needed beside it to count tokens.")
    if settings.modules is not None and not settings.modules:
        raise DatasetError("modules = (): name at least one Python module, or leave it out for the default ones.")
    if f"{settings.source.rstrip('/')}/".startswith(f"{uri.rstrip('/')}/"):
        raise DatasetError(f"output_uri = {uri!r}: holds the source, which would be overwritten; give another folder.")


def _code_digest() -> str:
    """Of what is running, which may lie in an archive."""
    package = resources.files(__package__)
    return code_archive.digest_of_code({name: (package / name).read_bytes() for name in _DECIDING_MODULES})


def _source_state(spark: SparkSession, settings: PrepareSettings) -> dict[str, Any]:
    """Changes whenever the source may have: versions of libraries, or kind and ``state`` of files."""
    if settings.source != DOCSTRINGS:
        return asdict(sources.list_files(spark, settings.source))
    versions: dict[str, Any] = cluster_calls.call(
        spark, corpus.installed_versions, list(corpus.libraries(settings.modules or corpus.DEFAULT_MODULES))
    )
    return versions


def _write_splits(
    private_uri: str, spark: SparkSession, settings: PrepareSettings, state: dict[str, Any]
) -> tuple[dict[str, int], dict[str, str]]:
    """Writes both splits; returns row counts by what became of the rows, and skipped modules with reasons."""
    F = functions_for(spark)
    kept_frames: list[DataFrame] = []
    try:
        raw, needs_prompt, skipped = _read(spark, settings, state, kept_frames)
        judged = cleaning.judge(raw, needs_prompt=needs_prompt, max_characters=settings.max_characters)
        judged = judged.persist()
        kept_frames.append(judged)
        verdicts = {row["verdict"]: row["count"] for row in judged.groupBy("verdict").count().collect()}
        _refuse_nothing_kept(settings, verdicts, skipped)
        rows = cleaning.scored(cleaning.distinct(judged.where(F.col("verdict") == "kept")), settings.salt).persist()
        kept_frames.append(rows)
        total, lowest, highest = rows.agg(F.count("key"), F.min("score"), F.max("score")).first() or (0, 0, 0)
        try:
            threshold = cleaning.heldout_threshold(settings.heldout_fraction, lowest, highest)
        except ValueError as error:
            raise DatasetError(
                f"source = {settings.source!r}: {error} after cleaning ({total} rows), so nothing can be held out; "
                "give rows with at least two different completions."
            ) from error
        heldout = F.col("score") < threshold
        _write(rows.where(~heldout), storage.join(private_uri, "train"), total)
        _write(rows.where(heldout), storage.join(private_uri, "heldout"), total)
    finally:
        for frame in kept_frames:
            frame.unpersist()
    counts = {name: verdicts.get(name, 0) for name in ("empty", "too_long")}
    read = sum(verdicts.values())
    return {"read": read, **counts, "duplicate": verdicts["kept"] - total, "kept": total}, skipped


def _read(
    spark: SparkSession, settings: PrepareSettings, state: dict[str, Any], kept_frames: list[DataFrame]
) -> tuple[DataFrame, bool, dict[str, str]]:
    """Rows, whether each needs a prompt, and modules that gave none with the reason."""
    if settings.source == DOCSTRINGS:
        extracted = sources.read_docstrings(spark, settings.modules or corpus.DEFAULT_MODULES).persist()
        kept_frames.append(extracted)
        reports = extracted.where("skipped is not null").orderBy("library").collect()
        skipped = {module: reason for row in reports for module, reason in json.loads(row["skipped"]).items()}
        return extracted.where("skipped is null").select("prompt", "completion"), True, skipped
    frame = sources.read_files(spark, settings.source, state["kind"])
    columns = sources.choose_columns(
        dict(frame.dtypes),
        prompt=settings.prompt_column,
        completion=settings.completion_column,
        text=settings.text_column,
    )
    return sources.select_rows(frame, columns), columns.prompt is not None, {}


def _refuse_nothing_kept(settings: PrepareSettings, verdicts: dict[str, int], skipped: dict[str, str]) -> None:
    if verdicts.get("kept"):
        return
    dropped = ", ".join(f"{count} {verdict.replace('_', ' ')}" for verdict, count in sorted(verdicts.items()))
    reasons = "; ".join(f"{module}: {reason}" for module, reason in skipped.items())
    raise DatasetError(
        f"source = {settings.source!r}: no rows are left after cleaning ({dropped or 'none were read'}"
        f"{'; ' + reasons if reasons else ''}). Give rows with text of at most {settings.max_characters} characters."
    )


def _write(rows: DataFrame, uri: str, total: int) -> None:
    """Rows lie in the order of their hash: equal input gives equal files, and any head of them is a sample."""
    files = math.ceil(total / ROWS_PER_FILE)
    ordered = rows.repartition(files, "key").sortWithinPartitions("key").select("prompt", "completion")
    ordered.write.parquet(uri)


def _measure(spark: SparkSession, settings: PrepareSettings, uri: str) -> dict[str, Any]:
    """Counts of one written split, and ``content``: two 64-bit sums over row hashes, which no order changes."""
    F = functions_for(spark)
    rows = spark.read.parquet(uri)
    text = F.concat_ws(" ", "prompt", "completion")
    row = F.to_json(F.struct("prompt", "completion"))
    measured = rows.agg(
        F.count("completion").alias("rows"),
        F.sum(F.char_length(text)).alias("characters"),
        F.sum(F.size(F.split(F.trim(text), r"\s+"))).alias("words"),
        F.sum(F.xxhash64(row).cast("decimal(38,0)")).cast("string").alias("first"),
        F.sum(F.xxhash64(F.lit(1), row).cast("decimal(38,0)")).cast("string").alias("second"),
    ).collect()[0]
    return {
        **{name: measured[name] for name in ("rows", "characters", "words")},
        "tokens": _count_tokens(rows, settings),
        "content": [measured["rows"], measured["first"], measured["second"]],
    }


def _count_tokens(rows: DataFrame, settings: PrepareSettings) -> int | None:
    """Tokens as training will see them without truncation; None when the cluster cannot load the tokenizer."""
    F = functions_for(rows)
    if not settings.model_ref:
        return None

    def count(batches: Iterator[pandas.DataFrame]) -> Iterator[pandas.DataFrame]:
        import pandas

        tokens_of = _token_counter(settings)
        for batch in batches:
            texts = zip(batch["prompt"], batch["completion"], strict=True)
            yield pandas.DataFrame({"tokens": [sum(tokens_of(*text) for text in texts) if tokens_of else None]})

    counted = rows.mapInPandas(count, "tokens bigint")
    tokens, unknown = counted.agg(F.sum("tokens"), F.sum(F.isnull("tokens").cast("int"))).collect()[0]
    if unknown:
        log.warning("Tokens are not counted: the cluster cannot load the tokenizer of %r", settings.model_ref)
    return None if unknown else int(tokens)


def _token_counter(settings: PrepareSettings) -> Callable[[str | None, str], int] | None:
    ref, revision, cache_uri = settings.model_ref or "", settings.model_revision, settings.cache_uri or ""
    try:
        from . import data, models

        tokenizer = models.load_tokenizer(models.resolve(ref, revision, cache_uri, weights=False))
    except (ImportError, OSError, ValueError):
        return None
    return lambda prompt, completion: len(
        data.encode(tokenizer, data.Row(prompt=prompt, completion=completion), sys.maxsize).token_ids
    )


def _still_there(spark: SparkSession, output_uri: str, manifest: dict[str, Any]) -> bool:
    try:
        return all(
            spark.read.parquet(storage.join(output_uri, split)).count() == manifest["splits"][split]["rows"]
            for split in SPLITS
        )
    except spark_errors():
        return False


def _claim(output_uri: str, settings_digest: str) -> dict[str, Any] | None:
    """The complete manifest made under these settings, if it is there. Runs on the cluster.

    Otherwise the folder stops being a data set: what is written next must not be read under an old manifest.
    """
    known = _manifest(output_uri, settings_digest)
    if known is None:
        storage.write_json(storage.join(output_uri, MANIFEST), {"complete": False})
    return known


def _manifest(output_uri: str, settings_digest: str) -> dict[str, Any] | None:
    try:
        manifest = storage.read_json(storage.join(output_uri, MANIFEST))
    except (OSError, ValueError):
        return None
    complete = manifest.get("complete") and manifest.get("settings_digest") == settings_digest
    return dict(manifest) if complete else None


def _publish(private_uri: str, output_uri: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """Moves both splits into place and returns the manifest that stands there. Runs on the cluster.

    Another that prepared the same meanwhile and came first is left alone. One that comes in between
    moves equal files to equal names.
    """
    known = _manifest(output_uri, manifest["settings_digest"])
    if known is None:
        for split in SPLITS:
            _move_split(storage.join(private_uri, split), storage.join(output_uri, split))
        storage.write_json(storage.join(output_uri, MANIFEST), manifest)
    storage.remove(private_uri)
    return known or manifest


def _move_split(private_uri: str, uri: str) -> None:
    written = [name for name in storage.file_names(private_uri) if name.endswith(".parquet")]
    moved = {name: f"part-{number:05d}.parquet" for number, name in enumerate(written)}
    for name, target in moved.items():
        storage.move_file(storage.join(private_uri, name), storage.join(uri, target))
    for stale in set(storage.file_names(uri)) - set(moved.values()):
        storage.remove(storage.join(uri, stale))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
