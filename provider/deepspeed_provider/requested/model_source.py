# SPDX-License-Identifier: Apache-2.0
"""Where a model's config comes from: the bundled catalogue, a file or folder, a dict, or the hub.

The pure room ``sizing`` reads configs that it is given; files and the network are here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import httpx

from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.families import architecture, from_parameter_count

CONFIG_FILE: Final = "config.json"
# A config.json has some kilobytes; what is larger is a weights file named by mistake.
LARGEST_CONFIG_BYTES: Final = 4 * 2**20
MOST_PARAMETERS: Final = 10**15
DOWNLOAD_TIMEOUT_SECONDS: Final = 10.0

Fetch = Callable[[str], Mapping[str, Any]]

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_COUNT: Final = re.compile(r"(\d[\d_,]*(?:\.\d+)?|\.\d+)(?:e([+-]?\d{1,2}))?\s*([kmbt]?)", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}


@dataclass(frozen=True, kw_only=True)
class Model:
    """An architecture and what to call it."""

    name: str
    architecture: Architecture


class ModelSource:
    """Reads models, each one once.

    ``fetch`` brings the config of a hub id over the network; without it the network is never used.
    """

    def __init__(self, *, fetch: Fetch | None = None) -> None:
        self._fetch = fetch
        self._known: dict[str, Model | SpecError] = {}

    def model(self, given: object) -> Model:
        """``given``: a hub id or its last part, the path of a config.json or of its folder, or a config.

        A file, or a folder with a config.json, goes before a name; a bundled name before the hub.
        Raises :class:`SpecError` with all problems.
        """
        if isinstance(given, Mapping):
            return Model(name=_own_name(given), architecture=architecture(given))
        if not isinstance(given, str) or not given.strip():
            raise _refused(given, "is neither a name, nor a path, nor a config", "Give a name such as 'gpt2'.")
        if given not in self._known:
            self._known[given] = self._read(given)
        known = self._known[given]
        if isinstance(known, SpecError):
            raise SpecError(known.problems)
        return known

    def _read(self, given: str) -> Model | SpecError:
        """An error is remembered too: a network that does not answer is waited for once."""
        try:
            return Model(name=given, architecture=architecture(self._config(given.strip())))
        except SpecError as error:
            return error

    def _config(self, given: str) -> Mapping[str, Any]:
        path = Path(given).expanduser() if given.startswith("~/") else Path(given)
        file = path / CONFIG_FILE if _is(path, "dir") else path
        if _is(file, "file"):
            return read_config(file, given)
        try:
            return model_config(given)
        except SpecError:
            if _is(path, "dir"):
                raise _refused(
                    given, f"is a folder without a {CONFIG_FILE}", "Give a model folder, or the file itself."
                ) from None
            if given.endswith(".json") or given.startswith((".", "/", "~")):
                raise _refused(given, "there is no such file", "Check the path, or give a model's name.") from None
            if self._fetch is None or not _HUB_ID.fullmatch(given):
                raise
        return self._fetch(given)


def counted_model(given: object) -> Model:
    """A model of which only the parameter count is known: 7B, 350M, 7e9, or a plain number."""
    count = parse_parameter_count(given)
    return Model(name=f"{count:,} parameters", architecture=from_parameter_count(count))


def parse_parameter_count(given: object) -> int:
    """Raises :class:`SpecError` for what is no count, or beyond :data:`MOST_PARAMETERS`."""
    text = "" if isinstance(given, bool) else str(given).strip()
    match = _COUNT.fullmatch(text)
    if match is None:
        raise _refused(given, "is no parameter count", "Use a number such as 7B, 350M or 7e9.", field="parameters")
    digits, exponent, unit = match.groups()
    count = Decimal(re.sub("[_,]", "", digits)).scaleb(int(exponent or 0) + _POWERS[unit.lower()])
    if count > MOST_PARAMETERS:
        raise _refused(given, "is more than any model has", "Use a number such as 7B.", field="parameters")
    return int(count)


def read_config(file: Path, given: str) -> Mapping[str, Any]:
    """The object in a JSON file, which the user called ``given``."""
    try:
        with file.open("rb") as opened:
            text = opened.read(LARGEST_CONFIG_BYTES + 1)
    except OSError as error:
        raise _refused(given, f"cannot be read ({error.strerror})", "Check its permissions.") from None
    if len(text) > LARGEST_CONFIG_BYTES:
        raise _refused(given, "is too large to be a config", f"Give a model's {CONFIG_FILE}.")
    return _parsed(text, given)


def hub_fetch(client: httpx.Client | None = None, environment: Mapping[str, str] = os.environ) -> Fetch:
    """Fetches config.json files from the hub that HF_ENDPOINT or huggingface_hub names.

    Sends the token of HF_TOKEN or of a login, which gated models need.
    """
    client = client or httpx.Client(timeout=DOWNLOAD_TIMEOUT_SECONDS, follow_redirects=True)

    def fetch(hub_id: str) -> Mapping[str, Any]:
        url = f"{_endpoint(hub_id, environment)}/{hub_id}/resolve/main/{CONFIG_FILE}"
        token = _token(environment)
        try:
            answer = client.get(url, headers={"Authorization": f"Bearer {token}"} if token else {})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _refused(
                hub_id, f"cannot be fetched from {url} ({error})", "Check the network, or give a path."
            ) from None
        if answer.status_code in (401, 403):
            raise _refused(
                hub_id, "is not there, or not for everybody", "Check the name; a gated model needs HF_TOKEN."
            )
        if answer.status_code != httpx.codes.OK:
            raise _refused(
                hub_id, f"{url} answers {answer.status_code}", "Check the name, or give the path of a config.json."
            )
        return _parsed(answer.content, hub_id)

    return fetch


def _endpoint(hub_id: str, environment: Mapping[str, str]) -> str:
    if environment.get("HF_ENDPOINT"):
        return environment["HF_ENDPOINT"].rstrip("/")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise _refused(
            hub_id, "cannot be fetched: no hub is known", "Install huggingface_hub, or set HF_ENDPOINT to its address."
        )
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _token(environment: Mapping[str, str]) -> str | None:
    if environment.get("HF_TOKEN") or importlib.util.find_spec("huggingface_hub") is None:
        return environment.get("HF_TOKEN")
    from huggingface_hub import get_token

    return get_token()


def _parsed(text: bytes, given: str) -> Mapping[str, Any]:
    works = f"Give a model's {CONFIG_FILE}."
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(given, f"is not JSON ({error})", works) from None
    if not isinstance(config, dict):
        raise _refused(given, f"holds a JSON {type(config).__name__}, not an object", works)
    return config


def _own_name(config: Mapping[str, Any]) -> str:
    return str(config.get("_name_or_path") or config.get("model_type") or "config")


def _is(path: Path, kind: str) -> bool:
    """Names that no file system takes are no files; a pipe is one."""
    try:
        return path.exists() and path.is_dir() == (kind == "dir")
    except (OSError, ValueError):
        return False


def _refused(value: object, problem: str, suggestion: str, field: str = "model") -> SpecError:
    return SpecError([FieldProblem(field=field, value=value, problem=problem, suggestion=suggestion)])
