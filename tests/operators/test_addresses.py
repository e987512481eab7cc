# SPDX-License-Identifier: Apache-2.0
"""Where people can look at a run: each address once, and nobody is asked in vain."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed_provider.backends.base import RunHandle
from deepspeed_provider.links import CLUSTER_LOGS_URL_KEY, DATABRICKS_RUN_URL_KEY, SPARK_UI_URL_KEY
from deepspeed_provider.operators.addresses import Addresses
from deepspeed_provider.runs.record import RunRecord

HANDLE = RunHandle(backend="b", token="t" * 40, generation=1, output_uri="/out", world_size=1, ids={})
RECORD = RunRecord(key="k", generation=1, digest="d", handle=HANDLE)
RUN, LOGS = {DATABRICKS_RUN_URL_KEY: "https://w/run"}, {CLUSTER_LOGS_URL_KEY: "https://w/logs"}

# (what the cluster tells at each question, how often it is asked, what is told in the end)
COURSES: dict[str, tuple[list[dict[str, str]], int, dict[str, str]]] = {
    "no cluster at first": ([RUN, RUN, {**RUN, **LOGS}], 3, {**RUN, **LOGS}),
    "a cluster at once": ([{**RUN, **LOGS}], 1, {**RUN, **LOGS}),
    "Spark Connect, which has no such page": ([{SPARK_UI_URL_KEY: "http://s"}], 1, {SPARK_UI_URL_KEY: "http://s"}),
}


@pytest.mark.parametrize(("answers", "asked", "told"), COURSES.values(), ids=COURSES)
def test_logs_are_asked_for_until_they_are_there(
    answers: list[dict[str, str]], asked: int, told: dict[str, str]
) -> None:
    questions: list[RunRecord] = []
    xcoms: list[tuple[str, str]] = []

    def links(record: RunRecord) -> dict[str, str]:
        questions.append(record)
        return answers[min(len(questions), len(answers)) - 1]

    def push(key: str, value: Any) -> None:
        xcoms.append((key, value))

    addresses = Addresses(SimpleNamespace(xcom_push=push), links=links, log=logging.getLogger("addresses"))
    addresses.tell(RECORD)
    for _ in range(5):
        addresses.tell_logs(RECORD)
    assert len(questions) == asked
    assert sorted(xcoms) == sorted(told.items()), "each address once"
