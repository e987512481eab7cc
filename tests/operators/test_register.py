# SPDX-License-Identifier: Apache-2.0
"""The gate, and a real MLflow registry behind it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import Asset
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from deepspeed_provider.backends.base import RunIdentity
from deepspeed_provider.operators.register import RegisterModelOperator, gate
from deepspeed_provider.runs.record import Outcome
from deepspeed_provider.runs.tracking import MlflowTracker, mlflow_client
from deepspeed_provider.spec import FineTuneSpec

SPEC = FineTuneSpec(model="base", registered_model_name="tuned-model").to_params()


def evaluation(base: float, tuned: float, ratio: float | None = None) -> dict[str, Any]:
    ratio = tuned / base if ratio is None else ratio
    return {"metrics": {"base_perplexity": base, "tuned_perplexity": tuned, "perplexity_ratio": ratio}}


@pytest.mark.parametrize(
    ("base", "tuned", "max_ratio", "passed"),
    [
        (32.7, 8.6, 1.0, True),
        (32.7, 8.6, 0.5, True),
        (32.7, 8.6, 0.2, False),
        (10.0, 10.0, 1.0, False),
        (10.0, 11.0, 1.0, False),
        (10.0, float("nan"), 1.0, False),
        (10.0, float("inf"), 1.0, False),
    ],
)
def test_gate(base: float, tuned: float, max_ratio: float, passed: bool) -> None:
    assert gate(evaluation(base, tuned), max_ratio).passed is passed


@pytest.mark.parametrize(("on_reject", "error"), [("fail", AirflowFailException), ("skip", AirflowSkipException)])
def test_a_worse_model_is_refused_with_both_numbers(on_reject: str, error: type[Exception]) -> None:
    operator = RegisterModelOperator(
        task_id="r", spec=SPEC, finetuned={}, evaluation=evaluation(8.6, 32.7), on_reject=on_reject
    )
    with pytest.raises(error, match=r"not registered.*32\.7 after and 8\.6 before"):
        operator.execute({})


def test_without_a_name_nothing_is_registered() -> None:
    operator = RegisterModelOperator(
        task_id="r", spec={**SPEC, "registered_model_name": None}, finetuned={}, evaluation=evaluation(9, 3)
    )
    with pytest.raises(AirflowSkipException, match="registered_model_name is empty"):
        operator.execute({})


@pytest.mark.parametrize("finetuned", [{"model_uri": "file:///m"}], ids=["no MLflow model"])
@pytest.mark.parametrize("uri", [None, "http://127.0.0.1:1"], ids=["no server", "server"])
def test_what_is_missing_is_named(uri: str | None, finetuned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    operator = RegisterModelOperator(
        task_id="r", spec=SPEC, finetuned=finetuned, evaluation=evaluation(9, 3), tracking_uri=uri
    )
    with pytest.raises(AirflowFailException, match=r"There is no MLflow .*The model itself is in file:///m"):
        operator.execute({})


@pytest.mark.slow
def test_a_better_model_is_registered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(uri)
    tracker = MlflowTracker(tracking_uri=uri, experiment="e", run_name="n")
    identity = RunIdentity(key="k", generation=1, digest="d")
    run_id, url = tracker.start(identity)
    assert run_id is not None
    assert tracker.start(identity) == (run_id, None)  # found again: one run per generation
    assert url is None  # a database has no pages
    other, _ = tracker.start(RunIdentity(key="k", generation=2, digest="d"))
    assert other != run_id
    with mlflow.start_run(run_id=run_id):
        model_uri = mlflow.pyfunc.log_model(
            name="model", python_model=lambda model_input: model_input, pip_requirements=[]
        ).model_uri
    tracker.end(run_id, Outcome.SUCCEEDED)

    asset = Asset("fine-tuned-model")
    events = {asset: SimpleNamespace(extra=None)}
    finetuned = {"token": "t1", "mlflow_model_uri": model_uri, "mlflow_run_id": run_id, "dataset_uri": "mem://d"}
    operator = RegisterModelOperator(
        task_id="r", spec=SPEC, finetuned=finetuned, evaluation=evaluation(30, 9), tracking_uri=uri, outlets=[asset]
    )
    first = operator.execute({"outlet_events": events})
    assert operator.execute({"outlet_events": events}) == first  # a retry finds its version
    assert (first["name"], first["version"], first["alias"]) == ("tuned-model", "1", "champion")
    assert events[asset].extra == first
    client = mlflow_client(uri)
    assert str(client.get_model_version_by_alias("tuned-model", "champion").version) == "1"
    assert client.get_run(run_id).info.status == "FINISHED"
    operator.finetuned = {**finetuned, "token": "t2"}
    assert operator.execute({"outlet_events": events})["version"] == "2"
