# SPDX-License-Identifier: Apache-2.0
"""Questions of the command line to a live workspace, by an Airflow connection."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Final

from deepspeed_provider.errors import SpecError
from deepspeed_provider.requested.files import read_answer

# By which Airflow's own commands say that they may read connections from its database.
_CONTEXT: Final = "_AIRFLOW_PROCESS_CONTEXT"


def asked_node_types(conn_id: str) -> Mapping[str, Any]:
    """The workspace's answer to list-node-types, as it came. Raises :class:`SpecError` where there is none."""
    # Airflow writes its log to where standard output is when it is imported; ours is for the answer.
    with redirect_stdout(sys.__stderr__):
        from deepspeed_provider.backends.base import BackendUnavailable
        from deepspeed_provider.backends.workspace_wire import WireRefused
        from deepspeed_provider.hooks.databricks import require_databricks
        from deepspeed_provider.hooks.workspace_offers import ask_offers

        try:
            with _with_database():
                require_databricks("conn_id", conn_id)
                answer = ask_offers(conn_id).node_types
        except WireRefused as error:
            text = f"the workspace refuses: {_told(error)}"
            raise SpecError.of("conn_id", conn_id, text, "Check its token.") from None
        except BackendUnavailable as error:
            text = f"no answer: {_told(error)}"
            raise SpecError.of("conn_id", conn_id, text, "Check the connection's host.") from None
    return read_answer(answer, "conn_id")


def _told(error: Exception) -> str:
    """Without its full stop: one follows."""
    return str(error).rstrip(".")


def save_answer(answer: Mapping[str, Any], file: str) -> None:
    """Raises :class:`SpecError` for a file that cannot be written."""
    try:
        Path(file).write_text(json.dumps(answer, indent=1), encoding="utf-8")
    except OSError as error:
        raise SpecError.of("save", file, f"cannot be written ({error.strerror})", "Check the path.") from None


@contextmanager
def _with_database() -> Iterator[None]:
    before = os.environ.get(_CONTEXT)
    os.environ[_CONTEXT] = "server"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CONTEXT]
        else:
            os.environ[_CONTEXT] = before
