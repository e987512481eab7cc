# SPDX-License-Identifier: Apache-2.0
"""Volumes (Files API) and the workspace's own files on the fake workspace."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from deepspeed_provider.testing.answers import Refused, invalid, missing
from deepspeed_provider.testing.clock import VirtualClock

VOLUME_DEPTH: Final = 5  # /, Volumes, catalog, schema, volume
LARGEST_IMPORT_BYTES: Final = 10 * 2**20
FORMATS: Final = ("SOURCE", "AUTO", "RAW")


class Files:
    """Everything that lies under ``/Volumes`` and ``/Workspace``, by absolute path.

    Attributes:
        contents: bytes by path; the workspace's own files begin with ``/Workspace``.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.contents: dict[str, bytes] = {}
        self._folders: set[str] = set()
        self._changed_ms: dict[str, int] = {}

    def write(self, path: str, data: bytes) -> None:
        """As a program on a cluster writes it."""
        self.contents[path] = data
        self._changed_ms[path] = self._clock.now_ms

    def upload(self, path: str, data: bytes, *, overwrite: bool) -> None:
        """``PUT /api/2.0/fs/files{path}``."""
        _require_volume(path)
        if path in self.contents and not overwrite:
            raise Refused(409, "ALREADY_EXISTS", f"The file {path} exists already.")
        self.write(path, data)

    def download(self, path: str) -> bytes:
        """``GET /api/2.0/fs/files{path}``."""
        _require_volume(path)
        return self._of(path)

    def remove(self, path: str) -> None:
        """``DELETE /api/2.0/fs/files{path}``."""
        self.download(path)
        del self.contents[path]

    def make_folder(self, path: str) -> None:
        """``PUT /api/2.0/fs/directories{path}``."""
        _require_volume(path)
        self._folders.add(path.rstrip("/"))

    def listing(self, path: str) -> dict[str, Any]:
        """``GET /api/2.0/fs/directories{path}``."""
        _require_volume(path)
        folder = PurePosixPath(path)
        below = [
            PurePosixPath(name) for name in {*self.contents, *self._folders} if folder in PurePosixPath(name).parents
        ]
        if not below and str(folder) not in self._folders and len(folder.parts) > VOLUME_DEPTH:
            raise missing(f"The directory {path} does not exist.")
        entries = []
        for child in sorted({name.relative_to(folder).parts[0] for name in below}):
            whole = str(folder / child)
            entry: dict[str, Any] = {"path": whole, "name": child, "is_directory": whole not in self.contents}
            if whole in self.contents:
                entry |= {"file_size": len(self.contents[whole]), "last_modified": self._changed_ms[whole]}
            entries.append(entry)
        return {"contents": entries}

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
        parent = str(PurePosixPath(path).parent)
        if parent not in self._folders and not any(name.startswith(f"{parent}/") for name in self.contents):
            raise missing(f"The parent folder ({parent.removeprefix('/Workspace')}) does not exist.")
        if path in self.contents and not body.get("overwrite"):
            raise Refused(400, "RESOURCE_ALREADY_EXISTS", f"{body['path']} already exists.")
        self.write(path, data)
        return {}

    def make_workspace_folder(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /api/2.0/workspace/mkdirs``, its parents too."""
        path = PurePosixPath(_workspace_path(body))
        self._folders |= {str(each) for each in (path, *path.parents)}
        return {}

    def status(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/workspace/get-status``."""
        path = _workspace_path(query)
        if path in self.contents:
            return {"path": query["path"], "object_type": "FILE", "object_id": 1, "size": len(self.contents[path])}
        if path in self._folders:
            return {"path": query["path"], "object_type": "DIRECTORY", "object_id": 2}
        raise missing(f"Path ({query['path']}) doesn't exist.")

    def export(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/workspace/export``."""
        return {"content": base64.b64encode(self._of(_workspace_path(query))).decode(), "file_type": "auto"}

    def list_workspace(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """``GET /api/2.0/workspace/list``."""
        folder = _workspace_path(query)
        if folder not in self._folders:
            raise missing(f"Path ({query['path']}) doesn't exist.")
        here = [name for name in self.contents if str(PurePosixPath(name).parent) == folder]
        return {
            "objects": [
                {"path": name.removeprefix("/Workspace"), "object_type": "FILE", "object_id": 1}
                for name in sorted(here)
            ]
        }

    def delete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /api/2.0/workspace/delete``."""
        path = _workspace_path(body)
        below = [name for name in self.contents if name == path or name.startswith(f"{path}/")]
        if not below and path not in self._folders:
            raise missing(f"Path ({body['path']}) doesn't exist.")
        for name in below:
            del self.contents[name]
        self._folders.discard(path)
        return {}

    def _of(self, path: str) -> bytes:
        if path not in self.contents:
            raise missing(f"The file {path} does not exist.")
        return self.contents[path]


def _require_volume(path: str) -> None:
    parts = PurePosixPath(path).parts
    if parts[:2] != ("/", "Volumes") or len(parts) < VOLUME_DEPTH:
        raise invalid(f"{path}: the Files API knows /Volumes/<catalog>/<schema>/<volume> and what lies in it.")


def _workspace_path(body: Mapping[str, Any]) -> str:
    """The path with its mount point, which the workspace API does with and without."""
    path = str(body.get("path", ""))
    if not path.startswith("/"):
        raise invalid(f"path = {path!r}: should be absolute")
    return path if path.startswith("/Workspace/") else f"/Workspace{path}"
