# SPDX-License-Identifier: Apache-2.0
"""The default corpus: what installed libraries say about their own API, as questions and answers.

Each library is imported in a process of its own, so that one that crashes, hangs, prints or takes
gigabytes costs nothing but its own rows. The rows depend on the installed versions alone.
Standard library only; runs on the cluster's Python workers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import zipimport
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .docstrings import Docstring, parse

DEFAULT_MODULES = (
    *("pyspark.sql", "pyspark.sql.functions", "pyspark.sql.types", "pyspark.sql.streaming", "pyspark.pandas"),
    *("pyspark.ml.feature", "pyspark.ml.classification", "pyspark.ml.regression", "pyspark.ml.torch.distributor"),
    *("airflow.sdk", "airflow.providers.databricks.operators.databricks", "airflow.providers.standard.operators.bash"),
    *("mlflow", "mlflow.client", "mlflow.models", "mlflow.pyfunc"),
    *("torch", "torch.nn", "torch.nn.functional", "torch.optim", "torch.optim.lr_scheduler", "torch.utils.data"),
    *("torch.distributed", "torch.distributions", "torch.linalg"),
)
"""Modules with a documented public API that are there wherever this provider trains. Missing ones are skipped.

Four libraries, and no more: importing each costs seconds, and a narrow subject is learnt in minutes.
"""

SECONDS_PER_LIBRARY = 300.0
MAX_PARAMETERS = 6
MIN_WORDS = 4
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_POINTER = re.compile(r"^(?:see|refer to|alias (?:for|of)|deprecated)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """What one library gave: pairs, and the modules that could not be read with the reason."""

    library: str
    pairs: tuple[Pair, ...]
    skipped: Mapping[str, str]


def libraries(modules: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Modules by top-level package, in the order given and without repeats."""
    grouped: dict[str, tuple[str, ...]] = {}
    for module in dict.fromkeys(modules):
        top = module.partition(".")[0]
        grouped[top] = (*grouped.get(top, ()), module)
    return grouped


def installed_versions(names: Sequence[str]) -> dict[str, str | None]:
    """Versions by top-level package in this interpreter; None for one that is not there."""
    distributions = importlib.metadata.packages_distributions()

    def versions(library: str) -> str:
        return ", ".join(
            f"{name} {importlib.metadata.version(name)}" for name in sorted({*distributions.get(library, ())})
        )

    return {library: versions(library) if _importable(library) else None for library in names}


def _importable(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except (ImportError, ValueError):
        return False


def extract(library: str, modules: Sequence[str], *, seconds: float = SECONDS_PER_LIBRARY) -> Extraction:
    """Reads ``modules`` of one library in a child process; never raises for what the library does."""
    if not _importable(library):
        return _nothing(library, modules, "not installed")
    with tempfile.TemporaryDirectory(prefix="corpus-") as scratch:
        answer = Path(scratch, "answer.json")
        command = [sys.executable, "-c", f"from {__name__} import _main; _main()", str(answer), *modules]
        log = Path(scratch, "log")
        try:
            with log.open("wb") as sink:
                code = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    cwd=scratch,
                    env=_environment(scratch),
                    timeout=seconds,
                    check=False,
                ).returncode
        except subprocess.TimeoutExpired:
            return _nothing(library, modules, f"not read within {seconds:g} s")
        if code != 0 or not answer.exists():
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            return _nothing(library, modules, f"its import ended the process (exit {code}): {' '.join(last)}"[:300])
        wire = json.loads(answer.read_text())
    return Extraction(library=library, pairs=tuple(Pair(**pair) for pair in wire["pairs"]), skipped=wire["skipped"])


def _nothing(library: str, modules: Sequence[str], reason: str) -> Extraction:
    return Extraction(library=library, pairs=(), skipped=dict.fromkeys(modules, reason))


def _environment(scratch: str) -> dict[str, str]:
    # Some libraries write a configuration on import (Airflow does) or start thread pools: neither is wanted here.
    # The hash seed fixes docstrings that are built from sets.
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONHASHSEED": "0",
        "HOME": scratch,
        "AIRFLOW_HOME": scratch,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _main() -> None:
    """The child: writes pairs and skipped modules to the file named first; the modules follow."""
    answer, *modules = sys.argv[1:]
    _uncover_installed_provider()
    by_completion: dict[str, Pair] = {}
    skipped: dict[str, str] = {}
    for name in modules:
        try:
            for pair in module_pairs(importlib.import_module(name)):
                # Aliases and inherited docstrings answer several questions alike: the shortest name is the public one.
                known = by_completion.get(pair.completion, pair)
                by_completion[pair.completion] = min(known, pair, key=lambda one: (len(one.prompt), one.prompt))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an import runs anybody's code
            skipped[name] = f"{type(error).__name__}: {error}"[:300]
    wire = {"pairs": [asdict(pair) for pair in by_completion.values()], "skipped": skipped}
    Path(answer).write_text(json.dumps(wire))
    sys.stdout.flush()
    os._exit(0)  # threads that a library started at import must not keep this process


def _uncover_installed_provider() -> None:
    """Lets ``import airflow`` find the whole provider where it is installed.

    Code that travelled in an archive holds ``training`` alone, comes first on the path and would hide it; where other
    code has travelled before, there are several, whose names end with a digest.
    """
    loader = __spec__.loader if __spec__ else None
    if isinstance(loader, zipimport.zipimporter):
        ours = Path(loader.archive).name.rpartition("-")[0]
        sys.path[:] = [path for path in sys.path if Path(path).name.rpartition("-")[0] != ours]
        package = __name__.partition(".")[0]
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def module_pairs(module: ModuleType) -> Iterator[Pair]:
    """Pairs of the public classes, functions, methods and properties that ``module`` shows, by name."""
    for name, value in _public_members(module):
        qualified = f"{module.__name__}.{name}"
        if inspect.isclass(value):
            yield from pairs(qualified, "class", _documentation(value))
            for member, kind, text in _own_members(value):
                yield from pairs(f"{qualified}.{member}", kind, text)
        elif callable(value):
            yield from pairs(qualified, "function", _documentation(value))


def _public_members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    library = module.__name__.partition(".")[0]
    for name in sorted(set(getattr(module, "__all__", None) or dir(module))):
        if not isinstance(name, str) or name.startswith("_"):
            continue
        try:
            value = getattr(module, name)
        except Exception:  # noqa: BLE001 - lazily loaded members may need packages that are not there
            continue
        home = getattr(value, "__module__", None)
        if not inspect.ismodule(value) and (not isinstance(home, str) or home.partition(".")[0] == library):
            yield name, value


def _own_members(owner: type) -> Iterator[tuple[str, str, str]]:
    for name, value in sorted(vars(owner).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield name, "property", _documentation(value)
        elif inspect.isroutine(value) or isinstance(value, (classmethod, staticmethod)):
            yield name, "method", _documentation(getattr(owner, name, value))


def _documentation(value: Any) -> str:
    """The object's own docstring; empty when it only shows that of its type."""
    text = getattr(value, "__doc__", None)
    if not isinstance(text, str) or text == getattr(type(value), "__doc__", None):
        return ""
    return text


def pairs(qualified: str, kind: str, raw: str) -> Iterator[Pair]:
    """Up to three questions that one docstring answers: what it is or does, its parameters, its value."""
    if not raw.strip() or _ADDRESS.search(raw):  # an address differs from run to run
        return
    document = parse(raw)
    for prompt, completion in (
        (_SUMMARY_QUESTIONS[kind].format(name=qualified), document.summary),
        (f"What are the parameters of `{qualified}`?", _parameter_list(document)),
        (f"What does `{qualified}` return?", document.returns if kind in ("function", "method") else ""),
    ):
        if is_prose(completion):
            yield Pair(prompt=prompt, completion=completion)


_SUMMARY_QUESTIONS = {
    "class": "What is `{name}`?",
    "function": "What does `{name}` do?",
    "method": "What does `{name}` do?",
    "property": "What does the property `{name}` hold?",
}


def _parameter_list(document: Docstring) -> str:
    shown, rest = document.parameters[:MAX_PARAMETERS], document.parameters[MAX_PARAMETERS:]
    if not any(parameter.text for parameter in shown):
        return ""
    named = ", ".join(f"`{parameter.name}`" for parameter in rest[:MAX_PARAMETERS])
    more = [f"- and {len(rest)} more, such as {named}"] if rest else []
    return "\n".join([*map(str, shown), *more])


def is_prose(text: str) -> bool:
    """English sentences that say something: enough words, mostly ASCII letters, no mere pointer elsewhere."""
    if len(text.split()) < MIN_WORDS or _POINTER.match(text):
        return False
    letters = sum(character.isascii() and (character.isalpha() or character.isspace()) for character in text)
    return letters >= 0.7 * len(text)
