# SPDX-License-Identifier: Apache-2.0
"""The code that travels to a cluster, as one zip whose name is its content."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

# A fixed time stamp makes equal code give equal bytes; a session refuses other bytes under a name that it knows.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def build_code_archive(code: tuple[str, ...], folder: Path) -> Path:
    """Zips modules and package folders so that each is importable under its own name.

    Returns:
        ``folder/deepspeed-provider-code-<digest>.zip``.

    Raises:
        FileNotFoundError: an entry does not exist.
    """
    members = archive_members(code)
    path = folder / f"deepspeed-provider-code-{digest_of_code(members)}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(members):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), members[name], zipfile.ZIP_DEFLATED)
    return path


def archive_members(code: tuple[str, ...]) -> dict[str, bytes]:
    """Source by its path in the archive.

    An entry ``path/to/package`` or ``path/to/module.py`` is placed at the top of the archive. An
    entry ``root::package/sub`` keeps the path below ``root`` and adds an empty ``__init__.py`` to
    each folder above, so that a sub-package travels without its parent's other modules.
    """
    members: dict[str, bytes] = {}
    for entry in code:
        root_text, separator, below = entry.partition("::")
        source = Path(root_text, below) if separator else Path(root_text)
        prefix = Path(below) if separator else Path(source.name)
        if not source.exists():
            raise FileNotFoundError(f"code to ship does not exist: {source}")
        for parent in prefix.parents:
            if parent.name:
                members.setdefault(f"{parent.as_posix()}/__init__.py", b"")
        files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
        for file in files:
            relative = prefix / file.relative_to(source) if source.is_dir() else prefix
            members[relative.as_posix()] = file.read_bytes()
    return members


def training_code() -> tuple[str, ...]:
    """This package, which travels with every run."""
    package = Path(__file__).parent
    return (f"{package.parents[1]}::{package.parent.name}/{package.name}",)


def digest_of_code(code: Mapping[str, bytes]) -> str:
    """16 hexadecimal digits that change with any name or byte."""
    whole = hashlib.sha256()
    for name in sorted(code):
        whole.update(f"{name}\0{len(code[name])}\0".encode() + code[name])
    return whole.hexdigest()[:16]
