"""A Python environment as a cluster has it: the libraries, but neither Airflow nor this project."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

FOREIGN = ("airflow", "apache_airflow", "deepspeed_provider", "airflow_provider_deepspeed", "__editable__")


def make_bare_environment(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    """Builds the environment from links to what is installed here; returns its interpreter.

    What begins with one of the names in ``without`` is left out as well.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        # A .pth file could lead back to the checkout.
        if (
            not entry.name.lower().startswith((*FOREIGN, *without))
            and entry.suffix != ".pth"
            and entry.name != "__pycache__"
        ):
            (site / entry.name).symlink_to(entry)
    probe = (
        "import importlib.util as u; print(*[bool(u.find_spec(n)) for n in ('deepspeed_provider', 'airflow', 'torch')])"
    )
    seen = subprocess.run([python, "-c", probe], capture_output=True, text=True, cwd=folder, check=True)
    assert seen.stdout.split() == ["False", "False", "True"], seen.stdout
    return python
