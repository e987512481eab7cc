# SPDX-License-Identifier: Apache-2.0
"""Small files and folders by URI, from inside a rank.

Plain paths, ``file:`` and what Databricks mounts (``dbfs:/``, ``/Volumes``) need the standard
library only. Any other scheme goes through fsspec, which the cluster must then carry.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def join(folder_uri: str, *names: str) -> str:
    """``folder_uri`` with ``names`` below it."""
    return "/".join([folder_uri.rstrip("/"), *names])


def mounted_path(uri: str) -> Path | None:
    """The path under which this machine sees ``uri``, or None for object storage."""
    scheme = urlsplit(uri).scheme
    if scheme == "file":
        return Path(unquote(urlsplit(uri).path))
    if scheme == "dbfs":
        return Path("/dbfs") / uri.removeprefix("dbfs:").lstrip("/")
    return None if "://" in uri else Path(uri)


def appendable(uri: str) -> bool:
    """Whether a file there can grow in place. Object stores and their FUSE mounts only replace files."""
    path = mounted_path(uri)
    return path is not None and path.parts[:2] not in (("/", "dbfs"), ("/", "Volumes"))


def read_text(uri: str) -> str:
    """The text of one file. Raises FileNotFoundError."""
    path = mounted_path(uri)
    if path is not None:
        return path.read_text(encoding="utf-8")
    with _fsspec_open(uri, "r") as stream:
        return str(stream.read())


def read_json(uri: str) -> Any:
    return json.loads(read_text(uri))


def write_text(uri: str, text: str) -> None:
    """Replace one file whole: a reader sees the old text or the new, never a part."""
    path = mounted_path(uri)
    if path is None:
        with _fsspec_open(uri, "w") as stream:
            stream.write(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def write_json(uri: str, value: Any) -> None:
    write_text(uri, json.dumps(value, indent=2, sort_keys=True) + "\n")


def append_text(uri: str, text: str) -> None:
    """Grow one file; only where ``appendable``."""
    path = mounted_path(uri)
    if path is None:
        raise ValueError(f"{uri} cannot be appended to")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(text)


def create_text(uri: str, text: str) -> bool:
    """Create one file; False, and nothing written, when it is there already.

    Atomic on a file system. Object storage through fsspec has no common exclusive create: there the
    check and the write are two steps.
    """
    path = mounted_path(uri)
    if path is None:
        if exists(uri):
            return False
        write_text(uri, text)
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        return False
    return True


def exists(uri: str) -> bool:
    path = mounted_path(uri)
    if path is not None:
        return path.exists()
    filesystem, remote = _filesystem(uri)
    return bool(filesystem.exists(remote))


def file_names(folder_uri: str) -> list[str]:
    """Names of the files right below a folder, sorted; none where there is no such folder."""
    path = mounted_path(folder_uri)
    if path is not None:
        return sorted(entry.name for entry in path.iterdir() if entry.is_file()) if path.is_dir() else []
    filesystem, remote = _filesystem(folder_uri)
    if not filesystem.exists(remote):
        return []
    entries = filesystem.ls(remote, detail=True)
    return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "file")


def move_file(uri: str, target_uri: str) -> None:
    """Moves one file, in place of the one at ``target_uri`` if there is one. A reader sees either whole."""
    source, target = mounted_path(uri), mounted_path(target_uri)
    if source is not None and target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source, target)
        return
    filesystem, remote = _filesystem(uri)
    filesystem.mv(remote, _filesystem(target_uri)[1])


def remove(uri: str) -> None:
    """Removes a file, or a folder with all that is in it; one that is not there is fine."""
    path = mounted_path(uri)
    if path is None:
        filesystem, remote = _filesystem(uri)
        if filesystem.exists(remote):
            filesystem.rm(remote, recursive=True)
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def folder_to_write(uri: str) -> Iterator[Path]:
    """A local folder whose files stand at ``uri`` when the block ends without an exception."""
    path = mounted_path(uri)
    if path is not None and appendable(uri):
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "folder"
        folder.mkdir()
        yield folder
        if path is not None:
            # FUSE mounts of object storage take whole files, but not the random writes of savers.
            shutil.copytree(folder, path, dirs_exist_ok=True)
        else:
            filesystem, remote = _filesystem(uri)
            filesystem.put(f"{folder}/", f"{remote.rstrip('/')}/", recursive=True)


def local_folder(uri: str, cache: Path) -> Path:
    """A local path of the folder at ``uri``: itself where it is mounted, else a copy under ``cache``."""
    path = mounted_path(uri)
    if path is not None:
        return path
    filesystem, remote = _filesystem(uri)
    if not filesystem.exists(remote):
        raise FileNotFoundError(uri)
    cache.mkdir(parents=True, exist_ok=True)
    filesystem.get(f"{remote.rstrip('/')}/", f"{cache}/", recursive=True)
    return cache


def _filesystem(uri: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{uri} needs the package fsspec and the driver of its scheme on the cluster") from error
    filesystem, remote = url_to_fs(uri)
    return filesystem, str(remote)


def _fsspec_open(uri: str, mode: str) -> Any:
    filesystem, remote = _filesystem(uri)
    if mode == "w":
        with suppress(NotImplementedError, OSError):
            filesystem.makedirs(remote.rsplit("/", 1)[0], exist_ok=True)
    return filesystem.open(remote, mode, encoding="utf-8")
