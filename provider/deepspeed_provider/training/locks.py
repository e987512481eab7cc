# SPDX-License-Identifier: Apache-2.0
"""One process of many does the work; and a process that was killed meanwhile blocks nobody."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``; waits for others. The kernel releases it when its holder dies."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def extension_build() -> Iterator[None]:
    """Where an operator of torch or DeepSpeed is compiled: one process at a time, and no wait for the dead.

    torch marks a compilation with a file named ``lock`` that only its maker removes
    (torch/utils/file_baton.py). A run killed while compiling leaves it behind, and every later run
    would wait for ever.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    with exclusive(root / "deepspeed-provider.lock"):
        clear_abandoned(root)
        yield


def clear_abandoned(root: Path) -> list[Path]:
    """Remove torch's lock files below ``root`` that no process of this machine holds open; returns them."""
    found = {path for depth in ("*/lock", "*/*/lock") for path in root.glob(depth)}
    abandoned = sorted(found - _held_open(found)) if found else []
    for path in abandoned:
        log.warning("removing %s, left behind by a compilation that was killed", path)
        path.unlink(missing_ok=True)
    return abandoned


def _held_open(paths: set[Path]) -> set[Path]:
    """Those of ``paths`` that some process has open. All of them where that cannot be told (no /proc)."""
    if not Path("/proc/self/fd").exists():
        return set(paths)
    names = {os.path.realpath(path): path for path in paths}
    held: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # Processes end meanwhile, and those of other users are not ours to read.
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    held.update(names[name] for name in [os.readlink(descriptor)] if name in names)
    return held
