# SPDX-License-Identifier: Apache-2.0
"""How a run is followed whose Airflow does not stay well."""

from __future__ import annotations

import httpx
import pytest
from deepspeed_provider.errors import EngineError
from deepspeed_provider.local.airflow_api import AirflowApi
from deepspeed_provider.local.demo import UNHEALTHY_SECONDS, follow

PARTS = ("metadatabase", "scheduler", "triggerer", "dag_processor")


class Airflow(httpx.BaseTransport):
    """Answers as an Airflow whose run ends at ``end_s``, and whose ``ill`` parts are not well between two times."""

    def __init__(self, *, end_s: float, ill: tuple[str, ...] = (), between: tuple[float, float] = (0, 0)) -> None:
        self.now_s, self.end_s, self.ill, self.between = 0.0, end_s, ill, between

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.endswith("/monitor/health"):
            ill = self.ill if self.between[0] <= self.now_s < self.between[1] else ()
            return httpx.Response(
                200, json={name: {"status": "unhealthy" if name in ill else "healthy"} for name in PARTS}
            )
        if path.endswith("/taskInstances"):
            return httpx.Response(200, json={"task_instances": []})
        return httpx.Response(200, json={"state": "success" if self.now_s >= self.end_s else "running"})


def followed(airflow: Airflow) -> str:
    api = AirflowApi("http://127.0.0.1", "admin", "a password")
    api._client.close()
    api._client = httpx.Client(base_url="http://127.0.0.1", transport=airflow)
    return follow(api, "one", lambda _: None, timeout_seconds=100_000, clock=lambda: airflow.now_s, sleep=airflow.sleep)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_has_ended_is_named(part: str) -> None:
    airflow = Airflow(end_s=50_000, ill=(part,), between=(30, 100_000))
    with pytest.raises(EngineError, match=f"Airflow's {part} reported nothing for 240 s"):
        followed(airflow)
    assert 30 + UNHEALTHY_SECONDS <= airflow.now_s < 60 + UNHEALTHY_SECONDS


def test_all_that_have_ended_are_named() -> None:
    airflow = Airflow(end_s=50_000, ill=("scheduler", "triggerer"), between=(30, 100_000))
    with pytest.raises(EngineError, match="scheduler and triggerer"):
        followed(airflow)


def test_one_that_is_late_for_a_while_is_waited_for() -> None:
    airflow = Airflow(end_s=1_000, ill=("triggerer",), between=(30, 30 + UNHEALTHY_SECONDS - 10))
    assert followed(airflow) == "success"


def test_a_run_that_has_ended_has_ended() -> None:
    assert followed(Airflow(end_s=0, ill=PARTS, between=(0, 100_000))) == "success"
