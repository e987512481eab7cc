# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from pathlib import Path

import pytest
from deepspeed_provider.training import storage


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        pytest.param("/a/b", "/a/b", id="plain"),
        pytest.param("file:///a/b%20c", "/a/b c", id="file with three slashes"),
        pytest.param("file:/a/b", "/a/b", id="file with one slash"),
        pytest.param("dbfs:/runs/7", "/dbfs/runs/7", id="dbfs"),
        pytest.param("/Volumes/main/default/v", "/Volumes/main/default/v", id="volume"),
        pytest.param("s3://bucket/key", None, id="object store"),
        pytest.param("abfss://c@a.dfs.core.windows.net/x", None, id="azure"),
    ],
)
def test_mounted_path(uri: str, path: str | None) -> None:
    assert storage.mounted_path(uri) == (None if path is None else Path(path))


@pytest.mark.parametrize(
    ("uri", "expected"),
    [("/a", True), ("file:///a", True), ("dbfs:/a", False), ("/Volumes/a", False), ("s3://a", False)],
)
def test_appendable(uri: str, expected: bool) -> None:
    assert storage.appendable(uri) is expected


@pytest.fixture(params=["plain", "file", "memory"])
def folder_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        pytest.importorskip("fsspec")
    return {"plain": str(tmp_path), "file": tmp_path.as_uri(), "memory": f"memory://{tmp_path.name}"}[request.param]


def test_round_trip_and_exclusive_create(folder_uri: str) -> None:
    uri = storage.join(folder_uri, "below", "x.json")
    assert not storage.exists(uri)
    storage.write_json(uri, {"ä": 1})
    assert storage.read_json(uri) == {"ä": 1}
    assert storage.create_text(uri, "other") is False
    assert storage.read_json(uri) == {"ä": 1}
    assert storage.create_text(storage.join(folder_uri, "new", "y"), "one") is True
    assert storage.read_text(storage.join(folder_uri, "new", "y")) == "one"


def test_missing_file(folder_uri: str) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read_text(storage.join(folder_uri, "no"))


def test_folder_to_write_and_read_back(folder_uri: str, tmp_path: Path) -> None:
    uri = storage.join(folder_uri, "model")
    with storage.folder_to_write(uri) as folder:
        (folder / "config.json").write_text("{}")
        (folder / "sub").mkdir()
        (folder / "sub" / "w").write_text("w")
    copy = storage.local_folder(uri, tmp_path / "cache")
    assert (copy / "config.json").read_text() == "{}"
    assert (copy / "sub" / "w").read_text() == "w"


def test_files_move_over_others_and_folders_go(folder_uri: str) -> None:
    private, place = storage.join(folder_uri, "private"), storage.join(folder_uri, "place")
    assert storage.file_names(place) == []
    for name, text in (("a", "new a"), ("b", "new b")):
        storage.write_text(storage.join(private, name), text)
    storage.write_text(storage.join(private, "below", "c"), "no file of this folder")
    storage.write_text(storage.join(place, "1"), "old")
    assert storage.file_names(private) == ["a", "b"]
    storage.move_file(storage.join(private, "a"), storage.join(place, "1"))
    storage.move_file(storage.join(private, "b"), storage.join(place, "2"))
    assert storage.file_names(place) == ["1", "2"]
    assert storage.read_text(storage.join(place, "1")) == "new a"
    assert storage.file_names(private) == []
    storage.remove(private)
    storage.remove(private)
    assert not storage.exists(storage.join(private, "below", "c"))
    storage.remove(storage.join(place, "2"))
    assert storage.file_names(place) == ["1"]


def test_only_one_creator_wins(tmp_path: Path) -> None:
    wins: list[bool] = []
    uri = str(tmp_path / "marker")
    threads = [threading.Thread(target=lambda n=n: wins.append(storage.create_text(uri, str(n)))) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wins) == [False] * 15 + [True]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    uri, done = str(tmp_path / "progress.json"), threading.Event()
    texts = {letter * 200_000 for letter in "ab"}
    storage.write_text(uri, "a" * 200_000)

    def write() -> None:
        for _ in range(30):
            for text in sorted(texts):
                storage.write_text(uri, text)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert storage.read_text(uri) in texts
    writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
