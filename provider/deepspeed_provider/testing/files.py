# SPDX-License-Identifier: Apache-2.0
"""Volumes (Files API) and the workspace's own files on the fake workspace.

Source, unless a line says otherwise: databricks-sdk 0.162, ``files.FilesAPI`` and ``workspace.WorkspaceAPI``.
"""

from __future__ import annotations

import base64
import binascii
import threading
import zlib
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from deepspeed_provider.testing.answers import Refused, flag, invalid, missing, page_of, text, whole
from deepspeed_provider.testing.clock import VirtualClock

VOLUME_DEPTH: Final = 5  # /, Volumes, catalog, schema, volume
ENTRIES_A_PAGE: Final = 1000
LARGEST_IMPORT_BYTES: Final = 10 * 2**20
FORMATS: Final = ("SOURCE", "AUTO", "RAW")
HOMES: Final = ("/Workspace/Users", "/Workspace/Shared")


@dataclass(frozen=True, kw_only=True)
class File:
    """A file as it is downloaded."""

    data: bytes
    modified_ms: int


class Files:
    """Everything that lies under ``/Volumes`` and ``/Workspace``, by absolute path; safe to use from several threads.

    Attributes:
        contents: bytes by path; the workspace's own files begin with ``/Workspace``.
    """

    def __init__(self, clock: VirtualClock, *, user: str) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self.contents: MutableMapping[str, bytes] = {}
        self._modified_ms: dict[str, int] = {}
        self._folders: set[str] = {"/Workspace", *HOMES, f"{HOMES[0]}/{user}"}

    def write(self, path: str, data: bytes) -> None:
        """As a program on a cluster writes it."""
        with self._lock:
            self.contents[path] = data
            self._modified_ms[path] = self._clock.now_ms

    def upload(self, path: str, data: bytes, query: Mapping[str, Any]) -> None:
        """``PUT /api/2.0/fs/files{path}``: one that is there is overwritten unless the query says no."""
        _require_volume(path)
        with self._lock:
            if path in self.contents and not flag(query, "overwrite", default=True):
                raise Refused(409, "ALREADY_EXISTS", f"The file {path} exists already.")
            self.write(path, data)

    def download(self, path: str) -> File:
        """``GET`` and ``HEAD`` of ``/api/2.0/fs/files{path}``."""
        _require_volume(path)
        with self._lock:
            return File(data=self._of(path), modified_ms=self._modified(path))

    def remove(self, path: str) -> None:
        """``DELETE /api/2.0/fs/files{path}``."""
        _require_volume(path)
        with self._lock:
            self._of(path)
            self._forget([path])

    def make_folder(self, path: str) -> None:
        """``PUT /api/2.0/fs/directories{path}``, its parents too."""
        _require_volume(path)
        with self._lock:
            self._folders |= {str(each) for each in _with_parents(path) if len(each.parts) > VOLUME_DEPTH}

    def require_folder(self, path: str) -> None:
        """``HEAD /api/2.0/fs/directories{path}``. A volume is there without being made."""
        _require_volume(path)
        folder = PurePosixPath(path)
        with self._lock:
            if len(folder.parts) > VOLUME_DEPTH and str(folder) not in self._folders and not self._below(folder):
                raise missing(f"The directory {path} does not exist.")

    def remove_folder(self, path: str) -> None:
        """``DELETE /api/2.0/fs/directories{path}``, of an empty one."""
        with self._lock:
            self.require_folder(path)
            if self._below(PurePosixPath(path)):
                raise Refused(400, "DIRECTORY_NOT_EMPTY", f"The directory {path} is not empty.")
            self._forget([str(PurePosixPath(path))])

    def listing(self, path: str, query: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/fs/directories{path}``."""
        size = min(whole(query, "page_size", ENTRIES_A_PAGE), ENTRIES_A_PAGE)
        with self._lock:
            self.require_folder(path)
            found, tokens = page_of(self._children(PurePosixPath(path)), query, size)
            tokens.pop("prev_page_token", None)  # the Files API has none
            return {"contents": [self._entry(child) for child in found], **tokens}

    def import_(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /api/2.0/workspace/import``."""
        path = _workspace_path(body)
        if (format_ := body.get("format", "SOURCE")) not in FORMATS:
            raise invalid(f"format = {format_!r}: use one of {', '.join(FORMATS)}.")
        try:
            data = base64.b64decode(body.get("content") or "", validate=True)
        except binascii.Error as error:
            raise invalid("content should be in base64.") from error
        if len(data) > LARGEST_IMPORT_BYTES:
            raise Refused(400, "MAX_NOTEBOOK_SIZE_EXCEEDED", f"{len(data)} bytes are more than 10 MiB.")
        with self._lock:
            parent = str(path.parent)
            if parent not in self._folders:
                raise missing(f"The parent folder ({parent.removeprefix('/Workspace')}) does not exist.")
            if str(path) in self._folders or (str(path) in self.contents and not flag(body, "overwrite")):
                raise Refused(400, "RESOURCE_ALREADY_EXISTS", f"{body['path']} already exists.")
            self.write(str(path), data)
        return {}

    def make_workspace_folder(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /api/2.0/workspace/mkdirs``, its parents too."""
        wanted = {str(each) for each in _with_parents(_workspace_path(body))}
        with self._lock:
            files = sorted(wanted & set(self.contents))
            if files:
                raise Refused(400, "RESOURCE_ALREADY_EXISTS", f"{files[0]} is there, and is no folder.")
            self._folders |= wanted - {"/"}
        return {}

    def status(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/workspace/get-status``."""
        path = _workspace_path(query)
        with self._lock:
            self._require_object(path)
            return self._object(path)

    def export(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/workspace/export``."""
        path = _workspace_path(query)
        with self._lock:
            return {"content": base64.b64encode(self._of(str(path))).decode(), "file_type": path.suffix.lstrip(".")}

    def list_workspace(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/workspace/list``."""
        path = _workspace_path(query)
        with self._lock:
            self._require_object(path)
            objects = [path] if str(path) in self.contents else self._children(path)
            return {"objects": [self._object(each) for each in objects]}

    def delete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /api/2.0/workspace/delete``."""
        path = _workspace_path(body)
        with self._lock:
            self._require_object(path)
            below = self._below(path)
            if below and not flag(body, "recursive"):
                raise Refused(400, "DIRECTORY_NOT_EMPTY", f"{body['path']} is not empty: say recursive.")
            self._forget(str(each) for each in (path, *below))
        return {}

    def _below(self, folder: PurePosixPath) -> list[PurePosixPath]:
        paths = [PurePosixPath(name) for name in {*self.contents, *self._folders}]
        return [path for path in paths if folder in path.parents]

    def _children(self, folder: PurePosixPath) -> list[PurePosixPath]:
        return sorted({folder / path.relative_to(folder).parts[0] for path in self._below(folder)})

    def _entry(self, path: PurePosixPath) -> dict[str, Any]:
        """As the Files API lists it."""
        entry: dict[str, Any] = {"path": str(path), "name": path.name, "is_directory": str(path) not in self.contents}
        if not entry["is_directory"]:
            entry |= {"file_size": len(self.contents[str(path)]), "last_modified": self._modified(str(path))}
        return entry

    def _object(self, path: PurePosixPath) -> dict[str, Any]:
        """As the workspace API shows it: without the mount point (assumed)."""
        name = str(path)
        shown = {"path": name.removeprefix("/Workspace") or "/", "object_id": zlib.crc32(name.encode())}
        if name not in self.contents:
            return {**shown, "object_type": "DIRECTORY"}
        modified = {"modified_at": self._modified(name), "size": len(self.contents[name])}
        return {**shown, "object_type": "FILE", **modified}

    def _modified(self, path: str) -> int:
        """What was not written here was written just now."""
        return self._modified_ms.get(path, self._clock.now_ms)

    def _require_object(self, path: PurePosixPath) -> None:
        if str(path) not in self.contents and str(path) not in self._folders:
            raise missing(f"Path ({str(path).removeprefix('/Workspace')}) doesn't exist.")

    def _of(self, path: str) -> bytes:
        if path not in self.contents:
            raise missing(f"The file {path} does not exist.")
        return self.contents[path]

    def _forget(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.contents.pop(path, None)
            self._modified_ms.pop(path, None)
            self._folders.discard(path)


def _with_parents(path: str | PurePosixPath) -> tuple[PurePosixPath, ...]:
    return (PurePosixPath(path), *PurePosixPath(path).parents)


def _require_volume(path: str) -> None:
    parts = PurePosixPath(path).parts
    if parts[:2] != ("/", "Volumes") or len(parts) < VOLUME_DEPTH:
        raise invalid(f"{path}: the Files API knows /Volumes/<catalog>/<schema>/<volume> and what lies in it.")


def _workspace_path(body: Mapping[str, Any]) -> PurePosixPath:
    """The path with its mount point, which the workspace API does with and without."""
    path = PurePosixPath(text(body, "path"))
    if not path.is_absolute():
        raise invalid(f"path = {str(path)!r}: should be absolute")
    return path if path.parts[:2] == ("/", "Workspace") else PurePosixPath("/Workspace", *path.parts[1:])
