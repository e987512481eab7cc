# SPDX-License-Identifier: Apache-2.0
"""A fake workspace in which time stands still, and the clients that ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from databricks.sdk import WorkspaceClient
from deepspeed_provider.testing.workspace import TOKEN, FakeWorkspace

from testing.asking import Asking


@pytest.fixture
def workspace() -> Iterator[FakeWorkspace]:
    with FakeWorkspace() as started:
        yield started


@pytest.fixture
def client(workspace: FakeWorkspace) -> WorkspaceClient:
    """The real one."""
    return WorkspaceClient(host=workspace.url, token=TOKEN, auth_type="pat")


@pytest.fixture
def asking(workspace: FakeWorkspace) -> Iterator[Asking]:
    with Asking(workspace) as each:
        yield each
