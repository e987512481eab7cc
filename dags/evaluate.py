# SPDX-License-Identifier: Apache-2.0
"""Compare a tuned model folder with its base model on the held-out split of a data set."""

from datetime import timedelta

from airflow.sdk import Param, dag
from deepspeed_provider.operators.dataset import PrepareDatasetOperator
from deepspeed_provider.operators.finetune import DeepSpeedEvaluateOperator
from deepspeed_provider.operators.validate import ValidateSpecOperator
from deepspeed_provider.params import HARDWARE, PLACE, finetune_params, place_params

TUNED = Param(
    type="string",
    title="Tuned model",
    description="Folder URI that a fine-tune left, its 'model_uri'.",
    section="Model and method",
)


@dag(
    schedule=None,
    catchup=False,
    params={
        "tuned_uri": TUNED,
        **finetune_params(
            "model",
            "model_revision",
            "data",
            "heldout_fraction",
            "sequence_length",
            "ranks",
            "precision",
            "evaluation_rows",
            "generations",
        ),
        **place_params(),
    },
    default_args={"retries": 1},
    tags=["deepspeed", "evaluation"],
    doc_md=__doc__,
)
def evaluate():
    spec = ValidateSpecOperator(task_id="validate", other_params=["tuned_uri"], **PLACE, **HARDWARE).output
    run = {"spec": spec, **PLACE, "deferrable": True, "timeout": timedelta(hours=2)}
    dataset = PrepareDatasetOperator(task_id="prepare", **run).output
    DeepSpeedEvaluateOperator(
        task_id="evaluate", dataset=dataset, finetuned="{{ params.tuned_uri }}", **run, **HARDWARE
    )


evaluate()
