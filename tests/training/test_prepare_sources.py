"""Reading what users bring: formats by real files on a real server, columns by table."""

from __future__ import annotations

import pytest
from deepspeed_provider.training.failures import InputError
from deepspeed_provider.training.sources import (
    Columns,
    DatasetError,
    choose_columns,
    list_files,
    read_files,
    select_rows,
)

from training.written_data import (
    ROWS,
    write_csv,
    write_json,
    write_jsonl,
    write_parquet,
    write_parquet_folder,
    write_text,
    write_two_kinds,
)

SPECIAL = [
    {"prompt": 'Say "hi",\nthen, go', "completion": 'He said "hi".\n\n    indented = 1\nDone, and "gone".'},
    {"prompt": "Où est la gare ?", "completion": "À côté du café 🚉, près de 東京."},
]


def read(spark, path):
    uri = f"file:{path}"
    return read_files(spark, uri, list_files(spark, uri).kind)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        pytest.param("d.jsonl", write_jsonl, id="jsonl"),
        pytest.param("lines.json", write_jsonl, id="json with an object a line"),
        pytest.param("array.json", write_json, id="json array over lines"),
        pytest.param("d.csv", write_csv, id="csv"),
        pytest.param("d.parquet", write_parquet, id="parquet"),
        pytest.param("folder", write_parquet_folder, id="folder of parquet"),
    ],
)
def test_every_format_gives_the_same_rows(spark, tmp_path, name, write):
    frame = read(spark, write(tmp_path / name, ROWS + SPECIAL))
    rows = select_rows(frame, choose_columns(dict(frame.dtypes))).collect()
    assert sorted((row.prompt, row.completion) for row in rows) == sorted(
        (row["prompt"], row["completion"]) for row in ROWS + SPECIAL
    )


def test_alpaca_rows_put_the_input_below_the_instruction(spark, tmp_path):
    rows = [
        {"instruction": "Add", "input": "1 and 2", "output": 3},
        {"instruction": "Greet", "input": " ", "output": "Hello"},
    ]
    frame = read(spark, write_jsonl(tmp_path / "d.jsonl", rows))
    chosen = select_rows(frame, choose_columns(dict(frame.dtypes))).collect()
    assert [tuple(row) for row in chosen] == [("Add\n\n1 and 2", "3"), ("Greet", "Hello")]


def test_state_of_files_changes_when_a_file_does(spark, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", ROWS)
    uri = f"file:{path}"
    first = list_files(spark, uri)
    assert list_files(spark, uri) == first
    write_jsonl(path, ROWS[:-1])
    assert list_files(spark, uri) != first


@pytest.mark.parametrize(
    ("write", "content", "name", "message"),
    [
        pytest.param(
            None, None, "gone.jsonl", r"source = 'file:.*gone.jsonl': the cluster finds no such", id="no file"
        ),
        pytest.param(write_text, "x", "d.docx", r"holds \.docx; give .*\.jsonl", id="unknown format"),
        pytest.param(write_two_kinds, ROWS, "mixed", r"holds \.csv, \.jsonl; give files of one kind", id="two kinds"),
        pytest.param(write_text, '{"text": "a"}\n{"text": \n', "d.jsonl", "not every line is a JSON", id="broken line"),
        pytest.param(write_text, "plain\nwords\n", "d.jsonl", "no line is a JSON object", id="no JSON at all"),
        pytest.param(write_text, "not parquet", "d.parquet", "cannot be read as parquet", id="not parquet"),
        pytest.param(write_text, "", "d.jsonl", "holds no file with content", id="empty file"),
    ],
)
def test_unreadable_sources_are_one_clear_sentence(spark, tmp_path, write, content, name, message):
    path = write(tmp_path / name, content) if write else tmp_path / name
    with pytest.raises(DatasetError, match=message) as caught:
        read(spark, path)
    assert isinstance(caught.value, InputError)  # judged as the user's own, so never retried
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("found", "named", "expected"),
    [
        pytest.param("prompt completion text", {}, Columns(prompt="prompt", completion="completion"), id="pair first"),
        pytest.param("Question ANSWER", {}, Columns(prompt="Question", completion="ANSWER"), id="any case"),
        pytest.param(
            "instruction input output",
            {},
            Columns(prompt="instruction", completion="output", context="input"),
            id="alpaca",
        ),
        pytest.param("instruction response", {}, Columns(prompt="instruction", completion="response"), id="dolly"),
        pytest.param("input output", {}, Columns(prompt="input", completion="output"), id="input is the prompt"),
        pytest.param("id text", {}, Columns(completion="text"), id="text"),
        pytest.param(
            "a b prompt completion", {"prompt": "a", "completion": "B"}, Columns(prompt="a", completion="b"), id="named"
        ),
        pytest.param("text body", {"text": "body"}, Columns(completion="body"), id="named text"),
        pytest.param("q body", {"completion": "body"}, Columns(completion="body"), id="completion alone is text"),
    ],
)
def test_columns_are_found(found, named, expected):
    assert choose_columns(dict.fromkeys(found.split(), "string"), **named) == expected


@pytest.mark.parametrize(
    ("found", "named", "message"),
    [
        pytest.param(
            {"a": "string", "b": "array<int>"}, {}, r"found a \(string\), b \(array.*question and answer", id="none"
        ),
        pytest.param({"text": "binary"}, {}, r"no usable columns: found text \(binary\)", id="not text"),
        pytest.param({}, {}, "no usable columns: found none", id="no columns"),
        pytest.param(
            {"prompt": "string", "completion": "string"},
            {"prompt": "promt", "completion": "completion"},
            r"prompt_column = 'promt': there is no such column. Did you mean 'prompt'\?",
            id="misspelt",
        ),
        pytest.param({"a": "string"}, {"text": "zzz"}, "text_column = 'zzz': .* There are: a", id="nothing near"),
        pytest.param({"a": "string"}, {"prompt": "a"}, "completion_column is needed", id="half a pair"),
        pytest.param({"a": "string"}, {"text": "a", "completion": "a"}, "text_column excludes", id="pair and text"),
        pytest.param({"a": "array<string>"}, {"text": "a"}, "holds array<string>, but text is needed", id="list"),
    ],
)
def test_unusable_columns_say_what_would_work(found, named, message):
    with pytest.raises(DatasetError, match=message):
        choose_columns(found, **named)
