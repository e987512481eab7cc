# SPDX-License-Identifier: Apache-2.0
"""Prepare a data set for fine-tuning: cleaned, de-duplicated, split, with a fingerprint."""

from datetime import timedelta

from airflow.sdk import dag
from deepspeed_provider.operators.dataset import PrepareDatasetOperator
from deepspeed_provider.operators.validate import ValidateSpecOperator
from deepspeed_provider.params import PLACE, finetune_params, place_params


@dag(
    schedule=None,
    catchup=False,
    params={**finetune_params("model", "data", "heldout_fraction"), **place_params(*PLACE)},
    default_args={"retries": 1},
    tags=["deepspeed", "data"],
    doc_md=__doc__,
)
def prepare_dataset():
    spec = ValidateSpecOperator(task_id="validate", trains=False, **PLACE).output
    PrepareDatasetOperator(task_id="prepare", spec=spec, **PLACE, deferrable=True, timeout=timedelta(hours=2))


prepare_dataset()
