# SPDX-License-Identifier: Apache-2.0
"""The shipped operators and trigger against the cluster in memory, as in a user's test."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from deepspeed_provider.errors import FailureKind
from deepspeed_provider.operators.dataset import PrepareDatasetOperator
from deepspeed_provider.operators.finetune import DeepSpeedEvaluateOperator, DeepSpeedFineTuneOperator
from deepspeed_provider.operators.register import gate
from deepspeed_provider.spec import FineTuneSpec
from deepspeed_provider.testing.memory_cluster import FakeCluster
from deepspeed_provider.testing.run_scripts import (
    Script,
    evaluates,
    fails,
    goes_on,
    is_cancelled,
    is_lost,
    succeeds,
)
from operators.fake_task import FakeTask

SPEC = FineTuneSpec(model="m", ranks=2, max_steps=3, effective_batch_size=4).to_params()
TERMINAL = {"status": "terminal", "state": "SUCCEEDED", "message": ""}


@pytest.fixture
def cluster(fake_spark_connect: FakeCluster) -> FakeCluster:
    return fake_spark_connect


def finetune(**options: Any) -> DeepSpeedFineTuneOperator:
    options = {"spec": SPEC, "dataset": "memory://data", "poll_interval": 0.0, **options}
    return DeepSpeedFineTuneOperator(task_id="train", **options)


def execute(operator: Any, task: FakeTask | None = None) -> Any:
    """One try of a task of its own."""
    return operator.execute((task or FakeTask(try_number=1)).context())


def test_the_way_from_data_to_the_gate(cluster: FakeCluster) -> None:
    dataset = execute(PrepareDatasetOperator(task_id="prepare", spec=SPEC))
    tuned = execute(finetune(dataset=dataset))
    compared = execute(
        DeepSpeedEvaluateOperator(task_id="evaluate", spec=SPEC, dataset=dataset, finetuned=tuned, poll_interval=0.0)
    )
    assert [settings.source for settings in cluster.datasets] == [SPEC["data"]]
    assert tuned["dataset_uri"] == dataset["dataset_uri"]
    assert tuned["model_uri"].startswith(tuned["output_uri"])
    assert compared["tuned_uri"] == tuned["model_uri"]
    assert gate(compared, 1.0).passed


@pytest.mark.parametrize(
    ("base_loss", "tuned_loss", "passes"), [(3.0, 2.0, True), (2.0, 3.0, False), (2.0, 2.0, False)]
)
def test_an_evaluation_has_the_losses_that_were_scripted(
    base_loss: float, tuned_loss: float, passes: bool, cluster: FakeCluster
) -> None:
    cluster.next_run(evaluates(base_loss=base_loss, tuned_loss=tuned_loss))
    options = {"spec": SPEC, "dataset": "memory://d", "finetuned": "memory://tuned", "poll_interval": 0.0}
    assert gate(execute(DeepSpeedEvaluateOperator(task_id="evaluate", **options)), 1.0).passed == passes


def test_a_result_is_the_usual_one_with_what_was_scripted(cluster: FakeCluster) -> None:
    cluster.next_run(succeeds(mlflow_model_uri="models:/m-1"))
    result = execute(finetune())
    assert result["mlflow_model_uri"] == "models:/m-1"
    assert result["token"] in cluster.runs


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind is not FailureKind.CANCELLED])
def test_a_failure_has_the_kind_that_was_scripted(kind: FailureKind, cluster: FakeCluster) -> None:
    cluster.next_run(fails(kind, "as scripted", rank=1, step=7))
    with pytest.raises(AirflowException, match="as scripted") as caught:
        execute(finetune())
    assert isinstance(caught.value, AirflowFailException) == (not kind.retryable)
    told_by = "operation error" if kind is FailureKind.CAPACITY else "failure file of rank 1"
    assert str(caught.value).startswith(str(kind))
    assert told_by in str(caught.value)


@pytest.mark.parametrize("script", [is_cancelled(), is_lost(), fails("CANCELLED")], ids=["cancelled", "lost", "error"])
def test_what_the_platform_ends_is_replaced(script: Script, cluster: FakeCluster) -> None:
    cluster.next_run(script)
    assert execute(finetune())["token"] == list(cluster.runs)[1]


def test_a_kind_that_is_none_is_refused_when_it_is_scripted() -> None:
    with pytest.raises(ValueError, match="GPU_OMM"):
        fails("GPU_OMM")


def test_a_run_past_its_deadline_is_cancelled(cluster: FakeCluster) -> None:
    cluster.next_run(goes_on())
    with pytest.raises(AirflowFailException, match="deadline"):
        execute(finetune(timeout=timedelta(0)))
    assert (cluster.cancels, cluster.alive) == (1, 0)


def test_a_result_outlives_a_server_that_comes_back_empty(cluster: FakeCluster) -> None:
    task = FakeTask(try_number=1)
    with pytest.raises(TaskDeferred) as deferred:
        execute(finetune(deferrable=True), task)
    [event] = fired(deferred.value.trigger)
    cluster.lose_everything()
    kwargs = {**(deferred.value.kwargs or {}), "event": event}
    result = finetune(deferrable=True).resume_execution("resume", kwargs, task.context())
    assert result["token"] == task.record["handle"]["token"]
    assert cluster.calls.count("submit") == 1


def test_the_trigger_finds_the_cluster_by_its_connection(cluster: FakeCluster) -> None:
    with pytest.raises(TaskDeferred) as deferred:
        execute(finetune(deferrable=True))
    assert fired(deferred.value.trigger) == [{**TERMINAL, "message": "fake SUCCEEDED"}]


def fired(trigger: Any) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [event.payload async for event in trigger.run()]

    return asyncio.run(collect())
