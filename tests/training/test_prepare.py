"""Data preparation on a real Spark Connect server: real files in, Parquet and a manifest out."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
import pytest
from deepspeed_provider.backends.spark_connect import SparkConnectBackend
from deepspeed_provider.training import corpus
from deepspeed_provider.training.prepare import DatasetError, PrepareSettings, prepare

from training.written_data import ROWS, write_jsonl


@pytest.fixture
def run(spark, tmp_path):
    """Prepares a source into a folder of this test; returns the manifest and the rows of both splits."""

    def prepare_here(source, output="out", **settings):
        folder = tmp_path / output
        uri = source if source == "docstrings" else f"file:{source}"
        manifest = prepare(spark, PrepareSettings(source=uri, output_uri=f"file:{folder}", **settings))
        return manifest, {split: read_split(folder, split) for split in ("train", "heldout")}

    return prepare_here


def read_split(folder, split):
    table = pq.read_table(folder / split)
    assert table.column_names == ["prompt", "completion"]
    return [(row["prompt"], row["completion"]) for row in table.to_pylist()]


def both(splits):
    return sorted((prompt or "", completion) for rows in splits.values() for prompt, completion in rows)


def test_from_file_to_data_set(run, tmp_path):
    rows = [*ROWS, ROWS[0], {"prompt": "empty", "completion": " "}, {"prompt": "long", "completion": "x" * 90}]
    manifest, splits = run(write_jsonl(tmp_path / "d.jsonl", rows), max_characters=80)
    assert both(splits) == sorted((row["prompt"], row["completion"]) for row in ROWS)
    assert manifest["rows"] == {"read": 43, "empty": 1, "too_long": 1, "duplicate": 1, "kept": 40}
    assert json.loads((tmp_path / "out" / "dataset.json").read_text()) == manifest


def test_text_without_prompts(run, tmp_path):
    manifest, splits = run(write_jsonl(tmp_path / "d.jsonl", [{"text": f"Plain text {n}."} for n in range(9)]))
    assert {prompt for rows in splits.values() for prompt, _ in rows} == {None}
    assert manifest["rows"]["kept"] == 9


def test_counts(run, tmp_path):
    manifest, splits = run(write_jsonl(tmp_path / "d.jsonl", ROWS))
    for name, rows in splits.items():
        texts = [f"{prompt} {completion}" for prompt, completion in rows]
        assert manifest["splits"][name] == {
            "rows": len(rows),
            "characters": sum(map(len, texts)),
            "words": sum(len(text.split()) for text in texts),
            "tokens": None,
        }


def test_rows_with_one_answer_share_a_split(run, tmp_path):
    rows = [{"prompt": f"q{n}", "completion": answer} for n in range(6) for answer in (f"Yes {n % 3}", f"yes  {n % 3}")]
    _, splits = run(write_jsonl(tmp_path / "d.jsonl", rows), heldout_fraction=0.5)
    answers = {name: {" ".join(answer.lower().split()) for _, answer in split} for name, split in splits.items()}
    assert answers["train"]
    assert answers["heldout"]
    assert not answers["train"] & answers["heldout"]
    assert len(both(splits)) == 12


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.001, 0.999], ids=["nothing would be held out", "nothing would be trained on"])
def test_no_split_is_empty(run, tmp_path, fraction):
    _, splits = run(write_jsonl(tmp_path / "d.jsonl", ROWS[:3]), heldout_fraction=fraction)
    assert len(splits["heldout" if fraction < 0.5 else "train"]) == 1
    assert len(both(splits)) == 3


@pytest.mark.slow
def test_order_partitions_and_time_change_nothing(run, tmp_path):
    reference, splits = run(write_jsonl(tmp_path / "d.jsonl", ROWS), heldout_fraction=0.3)
    for seed in range(2):
        shuffled = random.Random(seed).sample(ROWS * 2, 2 * len(ROWS))
        folder = tmp_path / f"parts{seed}"
        folder.mkdir()
        for part in range(seed + 1):
            write_jsonl(folder / f"{part}.jsonl", shuffled[part :: seed + 1])
        manifest, again = run(folder, output=f"out{seed}", heldout_fraction=0.3)
        assert again == splits
        assert manifest["fingerprint"] == reference["fingerprint"]
    other, resplit = run(tmp_path / "d.jsonl", output="salted", heldout_fraction=0.3, salt="another")
    assert resplit["heldout"] != splits["heldout"]
    assert other["fingerprint"] != reference["fingerprint"]


@pytest.mark.slow
def test_prepared_once(run, tmp_path):
    source = write_jsonl(tmp_path / "d.jsonl", ROWS)
    out = tmp_path / "out"

    def written():
        return {file: file.stat().st_mtime_ns for file in out.rglob("*.parquet")}

    first, _ = run(source)
    files = written()
    assert run(source)[0] == first
    assert written() == files, "an unchanged source is not prepared again"
    next(out.glob("train/*.parquet")).unlink()
    assert run(source)[0] == first, "what was lost is made again, equal"
    assert written() != files
    write_jsonl(source, [*ROWS, {"prompt": "new", "completion": "row"}])
    changed, splits = run(source)
    assert changed["fingerprint"] != first["fingerprint"]
    assert ("new", "row") in both(splits)
    interrupted = json.loads((out / "dataset.json").read_text()) | {"complete": False}
    (out / "dataset.json").write_text(json.dumps(interrupted))
    assert run(source)[0] == changed, "a half-written data set is not taken for a whole one"


@pytest.mark.slow
def test_two_at_once_leave_one_whole_data_set(engine, tmp_path):
    """Whichever comes first, and wherever the other is then: the rows of one, under one manifest."""
    source = write_jsonl(tmp_path / "d.jsonl", ROWS)
    settings = PrepareSettings(source=f"file:{source}", output_uri=f"file:{tmp_path / 'out'}")
    together = threading.Barrier(2)

    def prepare_too(_):
        with SparkConnectBackend(engine.url).session() as session:
            together.wait(60)
            return prepare(session, settings)

    with ThreadPoolExecutor(2) as pool:
        manifests = list(pool.map(prepare_too, range(2)))
    out = tmp_path / "out"
    assert manifests[0] == manifests[1] == json.loads((out / "dataset.json").read_text())
    splits = {split: read_split(out, split) for split in ("train", "heldout")}
    assert both(splits) == sorted((row["prompt"], row["completion"]) for row in ROWS)
    assert {split: len(rows) for split, rows in splits.items()} == {
        split: counts["rows"] for split, counts in manifests[0]["splits"].items()
    }
    assert sorted(entry.name for entry in out.iterdir()) == ["dataset.json", "heldout", "train"]
    for split in splits:
        assert [entry.name for entry in (out / split).iterdir()] == ["part-00000.parquet"]


def test_one_that_fails_leaves_no_rows_behind(spark, tmp_path):
    rows = [{"prompt": "a", "completion": "x"}, {"prompt": "b", "completion": "X"}]
    source = write_jsonl(tmp_path / "d.jsonl", rows)
    with pytest.raises(DatasetError):
        prepare(spark, PrepareSettings(source=f"file:{source}", output_uri=f"file:{tmp_path / 'out'}"))
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["dataset.json"]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        pytest.param(
            [{"text": " "}, {"text": "x" * 20}],
            {"max_characters": 9},
            "no rows are left after cleaning .1 empty, 1 too long.*at most 9 characters",
            id="all dropped",
        ),
        pytest.param(
            [{"prompt": "a", "completion": "x"}, {"prompt": "b", "completion": "X"}],
            {},
            "every row has the same completion.*at least two different",
            id="nothing to hold out",
        ),
        pytest.param(ROWS, {"heldout_fraction": 1.5}, "heldout_fraction = 1.5: give", id="fraction"),
        pytest.param(ROWS, {"max_characters": 0}, "max_characters = 0: give", id="characters"),
        pytest.param(ROWS, {"model_ref": "m"}, "cache_uri is needed", id="no cache"),
        pytest.param(ROWS, {"modules": ()}, "modules = .*: name at least one", id="no modules"),
        pytest.param(ROWS, {"output": "d.jsonl"}, "holds the source", id="output over the source"),
    ],
)
def test_bad_input_is_one_clear_sentence(run, tmp_path, rows, settings, message):
    with pytest.raises(DatasetError, match=message) as caught:
        run(write_jsonl(tmp_path / "d.jsonl", rows), **settings)
    assert "\n" not in str(caught.value)


def test_modules_that_gave_nothing_are_named(run):
    with pytest.raises(DatasetError, match=r"no rows .*no_such_library: not installed"):
        run("docstrings", modules=("no_such_library",))


def test_relative_output_is_refused(spark):
    with pytest.raises(DatasetError, match="output_uri = 'out': give an absolute path"):
        prepare(spark, PrepareSettings(source="docstrings", output_uri="out"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_default_corpus_at_scale(run):
    manifest, splits = run("docstrings")
    rows = both(splits)
    assert manifest["rows"]["kept"] == len(rows) >= 2000
    assert 0.08 < manifest["splits"]["heldout"]["rows"] / len(rows) < 0.12
    for library in ("pyspark", "mlflow", "torch", "airflow"):
        assert sum(f"`{library}." in prompt for prompt, _ in rows) > 100, (library, manifest["skipped"])
    assert all(corpus.is_prose(completion) and len(completion) < 2000 for _, completion in rows)
    assert (
        len({completion.lower() for _, completion in splits["train"]} & {c.lower() for _, c in splits["heldout"]}) == 0
    )
    # Read again, without Spark: the same versions give the same rows. One library is enough, importing is slow.
    again = corpus.extract("mlflow", corpus.libraries(corpus.DEFAULT_MODULES)["mlflow"]).pairs
    from_mlflow = {row for row in rows if "`mlflow." in row[0]}
    assert from_mlflow <= {(pair.prompt, pair.completion) for pair in again}
    assert len(again) - len(from_mlflow) <= manifest["rows"]["duplicate"] + manifest["rows"]["empty"]


@pytest.mark.slow
def test_tokens_are_what_training_will_see(run, tmp_path, tiny_model):
    from deepspeed_provider.training import data, models

    source, cache = write_jsonl(tmp_path / "d.jsonl", ROWS), str(tmp_path / "cache")
    manifest, splits = run(source, model_ref=str(tiny_model), cache_uri=cache)
    tokenizer = models.load_tokenizer(models.resolve(str(tiny_model), None, cache))
    for name, rows in splits.items():
        encoded = [data.encode(tokenizer, data.Row(prompt=p, completion=c), 10_000).token_ids for p, c in rows]
        assert manifest["splits"][name]["tokens"] == sum(map(len, encoded))
    unknown, _ = run(source, output="unknown", model_ref=str(tmp_path / "no-model"), cache_uri=cache)
    assert unknown["splits"]["train"]["tokens"] is None


@pytest.mark.slow
def test_cluster_without_our_package(bare_engine, tmp_path):
    """The server's interpreter sees the libraries, but not this package: its code must travel."""
    source = write_jsonl(tmp_path / "d.jsonl", ROWS)
    with SparkConnectBackend(bare_engine.url).session() as session:
        mine = prepare(session, PrepareSettings(source=f"file:{source}", output_uri=f"file:{tmp_path / 'mine'}"))
        docstrings = prepare(
            session,
            PrepareSettings(
                source="docstrings", output_uri=f"file:{tmp_path / 'corpus'}", modules=("httpx", "no_such_library")
            ),
        )
    assert mine["rows"]["kept"] == len(ROWS)
    assert docstrings["rows"]["kept"] > 100
    assert docstrings["skipped"] == {"no_such_library": "not installed"}
