# SPDX-License-Identifier: Apache-2.0
"""Files of a fake workspace that lie in a folder of this machine, where programs read and write them too."""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Final

# Where a path begins, not in the midst of one.
MOUNTED: Final = re.compile(r"(?<![\w./-])/(?:Volumes|Workspace)/")
# Texts that name other files; only in these do places differ between a program and the API.
TRANSLATED: Final = (".json", ".jsonl")


class MountedContents(MutableMapping[str, bytes]):
    """Bytes by the path that the API knows. ``/Volumes/…`` is ``<root>/Volumes/…`` for a program here.

    A real cluster has the same path on both sides. Here JSON files are translated on the way in and out, so that the
    programs need not know where they are.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def place(self, path: str) -> Path:
        """Where a program here finds what the API calls ``path``."""
        return self.root / path.lstrip("/")

    def inside(self, text: str) -> str:
        """``text`` with paths as programs see them."""
        return MOUNTED.sub(lambda found: f"{self.root}{found[0]}", text)

    def outside(self, text: str) -> str:
        """``text`` with paths as the API has them."""
        return text.replace(f"{self.root}/", "/")

    def __getitem__(self, path: str) -> bytes:
        try:
            data = self.place(path).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            raise KeyError(path) from None
        return self.outside(data.decode()).encode() if path.endswith(TRANSLATED) else data

    def __setitem__(self, path: str, data: bytes) -> None:
        place = self.place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(self.inside(data.decode()).encode() if path.endswith(TRANSLATED) else data)

    def __delitem__(self, path: str) -> None:
        self.place(path).unlink()

    def __iter__(self) -> Iterator[str]:
        for place in self.root.rglob("*"):
            # A name that begins with a dot is that of a file which is being written.
            if place.is_file() and not place.name.startswith("."):
                yield f"/{place.relative_to(self.root)}"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self.place(path).is_file()
