"""Real files in the formats that users bring, for the tests of data preparation."""

from __future__ import annotations

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = [{"prompt": f"What is {n} plus {n}?", "completion": f"The answer is {2 * n}."} for n in range(40)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path, rows):
    path.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    return path


def write_csv(path, rows):
    """As a spreadsheet does: with a byte order mark, quotes doubled, line feeds inside quotes."""
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_parquet_folder(path, rows):
    (path / "nested").mkdir(parents=True)
    write_parquet(path / "nested" / "a.parquet", rows[:15])
    write_parquet(path / "b.parquet", rows[15:])
    return path


def write_two_kinds(path, rows):
    path.mkdir()
    write_jsonl(path / "a.jsonl", rows)
    return write_csv(path / "b.csv", rows).parent


def write_text(path, text):
    path.write_text(text)
    return path
