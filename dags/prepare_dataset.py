# SPDX-License-Identifier: Apache-2.0
"""Prepare a data set for fine-tuning: cleaned, de-duplicated, split, with a fingerprint."""

from airflow.sdk import dag
from deepspeed_provider.operators.dataset import PrepareDatasetOperator, ValidateSpecOperator
from deepspeed_provider.params import finetune_params


@dag(
    schedule=None,
    catchup=False,
    params=finetune_params("model", "data", "heldout_fraction"),
    default_args={"retries": 1},
    tags=["deepspeed", "data"],
    doc_md=__doc__,
)
def prepare_dataset():
    spec = ValidateSpecOperator(task_id="validate").output
    PrepareDatasetOperator(task_id="prepare", spec=spec)


prepare_dataset()
