# SPDX-License-Identifier: Apache-2.0
"""Files of a Databricks workspace: those of Volumes and those below ``/Workspace``, by one set of verbs."""

from __future__ import annotations

import base64
import fnmatch
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

from deepspeed_provider.backends.workspace_wire import WireRefused, WorkspaceWire

VOLUMES: Final = "/Volumes/"
WORKSPACE: Final = "/Workspace/"
# By how the API says that something is not there.
_MISSING: Final = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")


def path_of(uri: str) -> str | None:
    """The path by which workspace and cluster both know ``uri``; None for storage that the workspace does not read."""
    path = uri.removeprefix("dbfs:") if uri.startswith(f"dbfs:{VOLUMES}") else uri
    return path if path.startswith((VOLUMES, WORKSPACE)) else None


class WorkspaceFiles:
    """Reads and writes whole small files. Paths are absolute."""

    def __init__(self, wire: WorkspaceWire) -> None:
        self._wire = wire

    def write(self, path: str, data: bytes) -> None:
        """Over what is there; folders above are made."""
        if path.startswith(VOLUMES):
            self._wire.upload(path, data)
            return
        self._wire.post("2.0/workspace/mkdirs", {"path": path.rpartition("/")[0]})
        content = base64.b64encode(data).decode()
        body = {"path": path, "format": "AUTO", "content": content, "overwrite": True}
        self._wire.post("2.0/workspace/import", body)

    def write_once(self, path: str, data: bytes) -> bool:
        """Writes a file whose name tells its content, unless it is there; whether it was written."""
        folder, _, name = path.rpartition("/")
        if name in self.names(folder):
            return False
        self.write(path, data)
        return True

    def read(self, path: str) -> bytes:
        """Raises FileNotFoundError."""
        try:
            if path.startswith(VOLUMES):
                return self._wire.download(path)
            answer = self._wire.get("2.0/workspace/export", {"path": path, "format": "AUTO"})
        except WireRefused as refused:
            if is_missing(refused):
                raise FileNotFoundError(path) from refused
            raise
        return base64.b64decode(answer.get("content") or "")

    def names(self, folder: str) -> set[str]:
        """Of the files in a folder; none where there is no such folder."""
        try:
            return set(self._listed(folder))
        except WireRefused as refused:
            if is_missing(refused):
                return set()
            raise

    def read_texts(self, pattern: str) -> dict[str, str]:
        """Texts of the files whose path matches; only the name may hold wildcards."""
        folder, _, name = pattern.rpartition("/")
        # A name without any is asked for at once: progress is, again and again.
        names = fnmatch.filter(self.names(folder), name) if set(name) & set("*?[") else [name]
        found = {}
        for each in sorted(names):
            try:
                found[each] = self.read(f"{folder}/{each}").decode()
            except (FileNotFoundError, UnicodeDecodeError):
                continue  # replaced or half-written just now
        return found

    def _listed(self, folder: str) -> Iterator[str]:
        if not folder.startswith(VOLUMES):
            entries = self._wire.get("2.0/workspace/list", {"path": folder}).get("objects") or []
            yield from (
                entry["path"].rpartition("/")[2] for entry in entries if entry.get("object_type") != "DIRECTORY"
            )
            return
        query: dict[str, Any] = {}
        while True:
            answer = self._wire.get(f"2.0/fs/directories{quote(folder)}", query)
            yield from (entry["name"] for entry in answer.get("contents") or () if not entry.get("is_directory"))
            if not answer.get("next_page_token"):
                return
            query = {"page_token": answer["next_page_token"]}


def is_missing(refused: WireRefused) -> bool:
    return refused.status == 404 or refused.error_code in _MISSING
