"""A fine-tune on a server whose Python has neither our package, nor Airflow, nor the checkout.

The code travels as session artifacts; progress, failures and results are read through the cluster.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
from deepspeed_provider.backends.base import RunIdentity, RunRequest, RunState
from deepspeed_provider.backends.spark_connect import SparkConnectBackend
from deepspeed_provider.errors import FineTuneError
from deepspeed_provider.runs import evidence
from deepspeed_provider.training.code_archive import training_code
from training import tiny_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def backend(bare_engine):
    return SparkConnectBackend(bare_engine.url)


def run(backend, request):
    handle = backend.mint(request, RunIdentity(key=request.output_uri, generation=1, digest=request.digest))
    backend.submit(request, handle)
    while not (status := backend.poll(handle)).state.terminal:
        time.sleep(0.5)
    return handle, status


def training_request(plan):
    return RunRequest(
        entry="deepspeed_provider.training.launcher:main",
        payload=plan.to_json(),
        code=training_code(),
        output_uri=plan.output_uri,
        gpus_per_node=2,
        use_gpu=False,
        deepspeed_config=plan.deepspeed_config,
    )


def test_the_ranks_see_nothing_of_the_submitting_side(backend, tmp_path):
    request = RunRequest(
        entry="where_am_i:main",
        payload={"checkout": str(ROOT / "provider")},
        code=(str(Path(__file__).with_name("where_am_i.py")),),
        output_uri=tmp_path.as_uri(),
        gpus_per_node=2,
        use_gpu=False,
    )
    handle, status = run(backend, request)
    assert status.state is RunState.SUCCEEDED
    seen = backend.result(handle)
    assert seen == {"airflow": False, "operators": False, "launcher": seen["launcher"], "checkout": []}
    assert "deepspeed-provider-code-" in seen["launcher"], "imported from the session's artifact"


def test_fine_tune_end_to_end_there(backend, tmp_path):
    model = tiny_runs.make_model(tmp_path / "base")
    dataset = tiny_runs.make_dataset(tmp_path / "data")
    plan = tiny_runs.plan(tmp_path / "out", model, dataset, method="lora")
    plan = dataclasses.replace(plan, output_uri=(tmp_path / "out").as_uri(), dataset_uri=dataset.as_uri())
    handle, status = run(backend, training_request(plan))
    assert status.state is RunState.SUCCEEDED, backend.read_texts(f"{plan.output_uri}/failure-rank*.json")
    result = backend.result(handle)
    assert result["metrics"]["steps"] == plan.optimization.max_steps
    stored = backend.read_texts(f"{plan.output_uri}/result.json")
    assert json.loads(stored["result.json"]) == result
    progress = evidence.read_progress(backend.read_texts(f"{plan.output_uri}/progress.json").values())
    assert "done" in str(progress)


def test_a_failure_there_reads_as_its_cause(backend, tmp_path):
    dataset = tiny_runs.make_dataset(tmp_path / "data")
    plan = tiny_runs.plan(tmp_path / "out", "no-such/model", dataset)
    plan = dataclasses.replace(plan, output_uri=(tmp_path / "out").as_uri())
    handle, status = run(backend, training_request(plan))
    assert status.state is RunState.FAILED
    failure = evidence.cause(backend.read_texts(f"{plan.output_uri}/failure-rank*.json"))
    assert failure.kind == "USER"
    assert "no-such/model" in failure.message
    with pytest.raises(FineTuneError, match="no-such/model"):
        backend.result(handle)
