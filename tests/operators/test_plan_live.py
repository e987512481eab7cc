# SPDX-License-Identifier: Apache-2.0
"""GpuPlanOperator that asks the workspace what it has: node types, their quotas, runtimes."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from deepspeed_provider.clusters.runtimes import default_runtime
from deepspeed_provider.testing import faults
from deepspeed_provider.testing.workspace import FakeWorkspace

from operators.test_plan import SEVEN_B, run

ASKED = {name: value for name, value in SEVEN_B.items() if name != "cloud"} | {
    "databricks_conn_id": "databricks_default"
}
NEWEST = default_runtime().spark_version
BEFORE = "16.4.x-gpu-ml-scala2.12"


@pytest.fixture
def workspace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    with FakeWorkspace(cloud=getattr(request, "param", "aws")) as found:
        monkeypatch.setenv("AIRFLOW_CONN_DATABRICKS_DEFAULT", found.connection_json)
        yield found


def keep(workspace: FakeWorkspace, *names: str) -> None:
    workspace.node_types[:] = [entry for entry in workspace.node_types if entry["node_type_id"] in names]


def has_runtimes(workspace: FakeWorkspace, *keys: str) -> None:
    workspace.spark_versions[:] = [{"key": key, "name": key} for key in keys]


def test_only_what_the_workspace_has_is_planned(workspace: FakeWorkspace) -> None:
    keep(workspace, "g5.12xlarge", "m5.xlarge")
    returned, markdown = run(**ASKED)
    assert {one["node_type_id"] for one in returned["candidates"]} == {"g5.12xlarge"}
    assert "not in this workspace" in markdown
    assert [asked.path for asked in workspace.requests] == ["clusters/spark-versions", "clusters/list-node-types"]


def test_the_connection_is_templated_and_may_be_none(workspace: FakeWorkspace) -> None:
    params = {"conn": "databricks_default"}
    assert run(params, **{**ASKED, "databricks_conn_id": "{{ params.conn }}"})[0] == run(**ASKED)[0]
    asked = len(workspace.requests)
    run({"conn": None}, **{**ASKED, "databricks_conn_id": "{{ params.conn }}"})
    assert len(workspace.requests) == asked


@pytest.mark.parametrize("workspace", ["azure"], indirect=True)
class TestQuota:
    TYPE = "Standard_NC24ads_A100_v4"

    def plan(self, workspace: FakeWorkspace, quota: int | None, **options: Any) -> dict[str, Any]:
        keep(workspace, self.TYPE)
        info = {} if quota is None else {"available_core_quota": quota, "total_core_quota": 2000}
        workspace.node_types[0]["node_info"] = info
        return run(**ASKED, objective="time", **options)[0]

    @pytest.mark.parametrize(
        ("quota", "nodes"),
        [
            pytest.param(24, 1, id="one machine"),
            pytest.param(48, 1, id="a second would have no driver"),
            pytest.param(72, 2, id="two and their driver"),
            pytest.param(10_000, 4, id="plenty"),
            pytest.param(None, 4, id="nothing is said"),
        ],
    )
    def test_no_more_machines_than_it_leaves(self, workspace: FakeWorkspace, quota: int | None, nodes: int) -> None:
        assert max(one["nodes"] for one in self.plan(workspace, quota)["candidates"]) == nodes

    def test_too_little_for_one_is_a_refusal_with_its_reason(self, workspace: FakeWorkspace) -> None:
        with pytest.raises(AirflowFailException, match="Nothing fits") as caught:
            self.plan(workspace, 23)
        assert "needs 24 cores of quota, 23 are left of 2000" in caught.value.markdown  # type: ignore[attr-defined]


class TestRuntime:
    def test_the_newest_that_the_workspace_has_too_is_used_and_said(self, workspace: FakeWorkspace) -> None:
        has_runtimes(workspace, "18.0.x-gpu-ml-scala2.13", "17.2.x-gpu-ml-scala2.13", BEFORE, "15.4.x-gpu-ml-scala2.12")
        returned, markdown = run(**ASKED)
        assert returned["cluster"]["spark_version"] == BEFORE
        said = f"This workspace does not have runtime {NEWEST}: {BEFORE} is used instead."
        assert said in returned["warnings"]
        assert said in markdown

    def test_the_newest_of_all_needs_no_word(self, workspace: FakeWorkspace) -> None:
        returned, markdown = run(**ASKED)
        assert returned["cluster"]["spark_version"] == NEWEST
        assert "is used instead" not in markdown

    def test_the_one_asked_for_is_taken_where_it_is_there(self, workspace: FakeWorkspace) -> None:
        returned, _ = run(**ASKED, spark_version="17.0.x-gpu-ml-scala2.13")
        assert returned["cluster"]["spark_version"] == "17.0.x-gpu-ml-scala2.13"

    @pytest.mark.parametrize(
        ("has", "asked", "said"),
        [
            pytest.param(
                [BEFORE],
                {"spark_version": NEWEST},
                f"spark_version = '{NEWEST}': is not among the runtimes of this workspace. Use '{BEFORE}'",
                id="the one asked for is not there",
            ),
            pytest.param(
                ["17.3.x-scala2.13"],
                {},
                f"spark_version = None: this workspace has no runtime that is known to suit. Known are {NEWEST}",
                id="none that suits",
            ),
        ],
    )
    def test_what_it_lacks_is_refused(
        self, workspace: FakeWorkspace, has: list[str], asked: dict[str, Any], said: str
    ) -> None:
        has_runtimes(workspace, *has)
        with pytest.raises(AirflowFailException) as caught:
            run(**{**ASKED, "method": "loar"}, **asked)
        assert said in str(caught.value)
        assert "method = 'loar'" in str(caught.value), "with all other problems"


def test_a_saved_answer_and_a_connection_contradict_each_other(workspace: FakeWorkspace) -> None:
    with pytest.raises(
        AirflowFailException, match=r"workspace_node_types = 'x\.json': is a saved answer, and the work"
    ):
        run(**ASKED, workspace_node_types="x.json")


def test_a_workspace_that_refuses_fails_without_a_retry(workspace: FakeWorkspace) -> None:
    workspace.tokens.clear()
    with pytest.raises(AirflowFailException, match="'databricks_default' does not tell what it has"):
        run(**ASKED)


def test_a_workspace_that_does_not_answer_is_asked_by_the_next_try(workspace: FakeWorkspace) -> None:
    workspace.fault(faults.too_many_requests(3600), path="clusters/*")
    with pytest.raises(AirflowException, match="'databricks_default' cannot be asked what it has") as caught:
        run(**ASKED)
    assert not isinstance(caught.value, AirflowFailException)
