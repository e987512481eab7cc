# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a language model: check, prepare, train, evaluate, register."""

from datetime import timedelta

from airflow.sdk import dag
from deepspeed_provider.assets import model_asset
from deepspeed_provider.operators.dataset import PrepareDatasetOperator
from deepspeed_provider.operators.finetune import DeepSpeedEvaluateOperator, DeepSpeedFineTuneOperator
from deepspeed_provider.operators.register import RegisterModelOperator
from deepspeed_provider.operators.validate import ValidateSpecOperator
from deepspeed_provider.params import HARDWARE, PLACE, finetune_params, place_params


@dag(
    schedule=None,
    catchup=False,
    params={**finetune_params(), **place_params()},
    default_args={"retries": 2, "retry_delay": timedelta(seconds=30)},
    tags=["deepspeed", "fine-tune"],
    doc_md=__doc__,
)
def finetune():
    spec = ValidateSpecOperator(task_id="validate", **PLACE, **HARDWARE).output
    run = {"spec": spec, **PLACE, "deferrable": True, "poll_interval": 5, "timeout": timedelta(hours=2)}
    dataset = PrepareDatasetOperator(task_id="prepare", **run).output
    train = {**run, **HARDWARE, "dataset": dataset}
    tuned = DeepSpeedFineTuneOperator(task_id="finetune", **{**train, "timeout": timedelta(hours=12)}).output
    evaluation = DeepSpeedEvaluateOperator(task_id="evaluate", finetuned=tuned, **train).output
    RegisterModelOperator(
        task_id="register",
        spec=spec,
        finetuned=tuned,
        evaluation=evaluation,
        outlets=[model_asset("fine-tuned-model")],
    )


finetune()
