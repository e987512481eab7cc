# SPDX-License-Identifier: Apache-2.0
"""The code that travels with a run, as one zip whose name is its content."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

# A fixed time stamp makes equal code give equal bytes, and so an equal name.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def build_code_archive(code: tuple[str, ...], folder: Path) -> Path:
    """Zips modules and package folders so that each is importable under its own name.

    An entry ``path/to/package`` or ``path/to/module.py`` is placed at the top of the archive. An
    entry ``root::package/sub`` keeps the path below ``root`` and adds an empty ``__init__.py`` to
    each folder above, so that a sub-package travels without its parent's other modules.

    Returns:
        ``folder/deepspeed-provider-code-<digest>.zip``.

    Raises:
        FileNotFoundError: an entry does not exist.
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
    digest = hashlib.sha256()
    for name in sorted(members):
        digest.update(name.encode() + b"\0" + members[name] + b"\0")
    path = folder / f"deepspeed-provider-code-{digest.hexdigest()[:16]}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(members):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), members[name], zipfile.ZIP_DEFLATED)
    return path


def training_code() -> tuple[str, ...]:
    """Our own ``training`` package, which travels with every run."""
    package = Path(__file__).parent.parent
    return (f"{package.parent}::{package.name}/training",)
