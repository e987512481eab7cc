# SPDX-License-Identifier: Apache-2.0
"""Entries for what users bring: a script, or a function, in every rank."""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import failures, git_checkout, guardian, once, storage
from .ranks import Rank, choose_accelerator

# For the script: where it may leave a JSON value for Airflow, and where DeepSpeed's configuration lies.
RESULT_VARIABLE = "DEEPSPEED_PROVIDER_RESULT"
CONFIG_VARIABLE = "DEEPSPEED_PROVIDER_CONFIG"
# How a script is told of the configuration, by the value of ``config_flags``.
CONFIG_FLAGS: Mapping[str, tuple[str, ...]] = {
    "deepspeed": ("--deepspeed", "--deepspeed_config", "{file}"),
    "hf": ("--deepspeed", "{file}"),
    "none": (),
}
# argparse's, for arguments that it does not know.
USAGE_STATUS = 2


def run_script(payload: dict[str, Any]) -> dict[str, Any]:
    """Runs a script as ``__main__``.

    Its result is the JSON value that rank 0's script leaves in the file of ``RESULT_VARIABLE``, else its exit status.
    """
    return _once(payload, _run_script)


def call_function(payload: dict[str, Any]) -> dict[str, Any]:
    """Calls a function, pickled by value or named as ``module:function``; its result is what rank 0's returns."""
    return _once(payload, _call_function)


def require_python(wanted: str) -> None:
    """Raises InputError when a function was pickled by another minor version of Python; empty for any."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if wanted and wanted != here:
        raise failures.InputError(
            f"the function was pickled by Python {wanted}, which Python {here} of this cluster cannot read. Take a "
            f"runtime with Python {wanted}, or give the function by name, as 'module:function', with code."
        )


def _once(payload: Mapping[str, Any], work: Callable[[Mapping[str, Any], Rank], Any]) -> dict[str, Any]:
    guardian.start(os.environ)
    rank = Rank.from_environment(os.environ, use_gpu=bool(payload["use_gpu"]))
    output_uri, token = payload["output_uri"], payload["token"]
    try:
        if not once.mark_started(output_uri, token, rank):
            raise once.second_start(output_uri)
        if rank.world_size != payload["world_size"]:
            raise failures.InputError(
                f"nodes and gpus_per_node ask for {payload['world_size']} ranks, but {rank.world_size} were started."
            )
        choose_accelerator(rank.use_gpu)
        os.environ.update(payload.get("tracking") or {})
        returned = work(payload, rank)
        if rank.is_first:
            _require_json(returned)
    except BaseException as error:
        once.write_failure(output_uri, error, rank, phase="running")
        raise
    return {"token": token, "returned": returned if rank.is_first else None}


def _require_json(value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise failures.InputError(f"what was returned goes back as JSON: {error}. Return numbers and texts.") from error


def _run_script(payload: Mapping[str, Any], rank: Rank) -> Any:
    with tempfile.TemporaryDirectory() as scratch, _here_again():
        folder = Path(scratch)
        script = _script_file(payload, folder, rank)
        result = folder / "result.json"
        os.environ[RESULT_VARIABLE] = str(result)
        words = [*payload["arguments"], *_config_words(payload, folder / "deepspeed_config.json")]
        sys.argv = [str(script), *words]
        # As for any script: modules beside it are found.
        sys.path.insert(0, str(script.parent))
        _run_to_end(script, words)
        return json.loads(result.read_text(encoding="utf-8")) if result.exists() else {"exit_status": 0}


@contextmanager
def _here_again() -> Iterator[None]:
    """Back in this folder afterwards: who called may not live in one that is gone."""
    here = os.getcwd()
    try:
        yield
    finally:
        os.chdir(here)


def _script_file(payload: Mapping[str, Any], folder: Path, rank: Rank) -> Path:
    """A file of the script: the cluster's own, one in Git, or the one that travels beside this package."""
    script: Mapping[str, Any] = payload["script"]
    if "git" in script:
        root = git_checkout.checkout(script["git"], payload["output_uri"], folder / "git", is_first=rank.is_first)
        if not (root / script["path"]).is_file():
            raise failures.InputError(f"script = {script['path']!r}: no such file in {script['git']['git_url']}.")
        # Scripts name what lies in their repository from its root.
        os.chdir(root)
        return root / str(script["path"])
    if "uri" in script:
        path = storage.mounted_path(script["uri"])
        if path is None or not path.is_file():
            raise failures.InputError(f"script = {script['uri']!r}: no such file for the ranks.")
        return path
    path = folder / "code" / str(script["shipped"])
    path.parent.mkdir()
    # Also out of an archive, and never by import: the distributor has a module of its own called "train".
    source = Path(__file__).parents[2] / script["shipped"]
    path.write_bytes(__loader__.get_data(str(source)))  # type: ignore[name-defined]
    return path


def _config_words(payload: Mapping[str, Any], file: Path) -> list[str]:
    """The flags that name DeepSpeed's configuration; without one there are none."""
    if payload["deepspeed_config"] is None:
        return []
    file.write_text(json.dumps(payload["deepspeed_config"]), encoding="utf-8")
    os.environ[CONFIG_VARIABLE] = str(file)
    return [word.format(file=file) for word in CONFIG_FLAGS[payload["config_flags"]]]


def _run_to_end(script: Path, words: list[str]) -> None:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code in (None, 0):
            return
        if end.code == USAGE_STATUS:
            raise failures.InputError(
                f"{script.name} ended with status 2, as for arguments that it does not know: {' '.join(words)}. "
                "config_flags says by which flags it is told of the DeepSpeed configuration."
            ) from end
        raise RuntimeError(f"{script.name} ended with status {end.code}") from end


def _call_function(payload: Mapping[str, Any], rank: Rank) -> Any:  # noqa: ARG001
    given = payload["function"]
    if "pickled" in given:
        require_python(given["python"])
        function = pickle.loads(base64.b64decode(given["pickled"]))
    else:
        module, _, name = given["name"].partition(":")
        function = getattr(importlib.import_module(module), name)
    return function(**payload["arguments"])
