# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["blocking", "deferrable"])
def deferrable(request: pytest.FixtureRequest) -> bool:
    """Both ways to wait."""
    return request.param
