# SPDX-License-Identifier: Apache-2.0
"""What the training operators send to the cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from deepspeed_provider.operators.finetune import DeepSpeedEvaluateOperator, DeepSpeedFineTuneOperator
from deepspeed_provider.operators.training_job import ENTRY
from deepspeed_provider.planning import Hardware
from deepspeed_provider.spec import FineTuneSpec
from deepspeed_provider.testing.memory_cluster import FakeBackend, FakeCluster
from deepspeed_provider.training.plan import TrainingPlan

from operators.fake_task import FakeClock, FakeTask, cluster_of

SPEC = FineTuneSpec(model="m", ranks=2, max_steps=3, effective_batch_size=4, evaluation_rows=9).to_params()
DATASET = {"dataset_uri": "mem://data", "rows": {}}
TUNED = {"model_uri": "mem://tuned", "mlflow_run_id": "abc", "mlflow_url": "http://mlflow/#/abc", "token": "t"}


class OnFakeCluster:
    """Where the real operators find their cluster."""

    cluster: FakeCluster

    def get_backend(self) -> FakeBackend:
        return FakeBackend(self.cluster)

    def get_base_uri(self) -> str:
        return "mem://runs"

    def get_links(self, record: Any) -> dict[str, str]:
        return {}

    def get_hardware(self, spec: FineTuneSpec) -> Hardware:
        return Hardware(gpus_per_node=spec.ranks, use_gpu=False)


class FineTune(OnFakeCluster, DeepSpeedFineTuneOperator):
    pass


class Evaluate(OnFakeCluster, DeepSpeedEvaluateOperator):
    pass


def run(operator: Any, task: FakeTask) -> Any:
    operator.cluster, operator.clock, operator.sleep = task.cluster, task.clock, task.clock.sleep
    task.try_number += 1
    return operator.execute(task.context())


@pytest.fixture(autouse=True)
def no_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_a_finetune_sends_a_plan_that_the_ranks_can_read() -> None:
    task = FakeTask()
    output = run(FineTune(task_id="train", spec=SPEC, dataset=DATASET), task)
    request = next(iter(task.cluster.runs.values())).request
    training = TrainingPlan.from_json(json.loads(json.dumps(request.payload)))
    assert request.entry == ENTRY
    assert (request.world_size, request.use_gpu, training.job) == (2, False, "finetune")
    assert request.output_uri == training.output_uri == output["output_uri"]
    assert training.token == task.record["handle"]["token"] == output["token"]
    assert training.cache_uri == "mem://runs/cache"
    assert request.deepspeed_config == training.deepspeed_config
    assert training.tracking is None
    assert output["dataset_uri"] == "mem://data"


def test_an_evaluation_logs_into_the_run_of_its_finetune() -> None:
    task = FakeTask()
    options = {"spec": SPEC, "dataset": "mem://data", "finetuned": TUNED, "tracking_uri": "http://mlflow"}
    output = run(Evaluate(task_id="train", **options), task)
    request = next(iter(task.cluster.runs.values())).request
    training = TrainingPlan.from_json(json.loads(json.dumps(request.payload)))
    assert training.tracking is not None
    assert training.tracking.run_id == output["mlflow_run_id"] == "abc"
    assert training.evaluation is not None
    assert (training.evaluation.tuned_uri, training.evaluation.rows) == ("mem://tuned", 9)
    assert request.deepspeed_config is None
    assert task.xcoms == {"mlflow_run_url": "http://mlflow/#/abc"}


def test_a_tracking_server_that_is_down_does_not_stop_the_training() -> None:
    task = FakeTask()
    operator = FineTune(task_id="train", spec=SPEC, dataset=DATASET, tracking_uri="http://127.0.0.1:1")
    assert run(operator, task)["mlflow_run_id"] is None
    assert len(task.cluster.runs) == 1


@pytest.mark.parametrize("uri", ["http://me:hunter2@mlflow", "postgresql://me:hunter2@db/mlflow"])
def test_a_password_in_the_tracking_address_is_refused_and_not_repeated(uri: str) -> None:
    task = FakeTask()
    with pytest.raises(AirflowFailException, match="holds a password") as caught:
        run(FineTune(task_id="train", spec=SPEC, dataset=DATASET, tracking_uri=uri), task)
    assert "hunter2" not in str(caught.value)
    assert task.cluster.calls == []


def test_the_identity_does_not_depend_on_where_the_run_leaves_its_files() -> None:
    digests = set()
    for _ in range(2):
        task = FakeTask(clock=FakeClock())
        run(FineTune(task_id="train", spec=SPEC, dataset=DATASET), task)
        digests.add(task.record["digest"])
    task = FakeTask()
    run(FineTune(task_id="train", spec={**SPEC, "seed": 7}, dataset=DATASET), task)
    assert len(digests) == 1
    assert task.record["digest"] not in digests


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param({"spec": {"max_steps": 0, "modle": "x"}}, "3 problems", id="a spec with problems"),
        pytest.param({"spec": {**SPEC, "precision": "fp16"}}, "fp16 on CPU", id="a spec for other hardware"),
        pytest.param({"dataset": {"rows": 3}}, "neither a URI nor", id="no data set"),
    ],
)
def test_what_cannot_run_fails_at_once_without_a_retry(options: dict[str, Any], text: str) -> None:
    task = FakeTask()
    with pytest.raises(AirflowFailException, match=text):
        run(FineTune(task_id="train", **{"spec": SPEC, "dataset": DATASET, **options}), task)
    assert task.cluster.calls == []
    assert task.record is None


def test_nothing_secret_is_in_what_is_stored() -> None:
    task = FakeTask()
    operator = FineTune(task_id="train", spec=SPEC, dataset=DATASET, deferrable=True)
    with pytest.raises(TaskDeferred) as deferred:
        run(operator, task)
    for text in (str(task.store.values), str(deferred.value.trigger.serialize()), repr(operator)):
        assert "sc://" not in text
        assert len(text) < 4000


def test_a_failed_task_says_where_to_look() -> None:
    from deepspeed_provider.backends.base import RunState

    task = FakeTask(cluster=cluster_of((RunState.FAILED,)))
    with pytest.raises(AirflowException, match="generation 1; files: mem://runs/dag/train/"):
        run(FineTune(task_id="train", spec=SPEC, dataset=DATASET), task)
