# SPDX-License-Identifier: Apache-2.0
"""Choose and price a GPU cluster for a fine-tune, and let somebody decide whether it may cost that much."""

import json
import logging
from datetime import timedelta

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import Param, dag, task
from deepspeed_provider.operators.plan import GpuPlanOperator

TEXT, NUMBER = ["string", "null"], ["number", "string", "null"]
PARAMS = {
    "model": Param("meta-llama/Llama-2-7b-hf", type="string", description="Hub id, or path of a config.json."),
    "method": Param("lora", type="string", enum=["full", "lora", "qlora"]),
    "tokens": Param("50M", type=["string", "integer"], description="Of the whole run, padding included."),
    "sequence_length": Param(2048, type=["integer", "string"]),
    "effective_batch_size": Param(64, type=["integer", "string"], description="Sequences per optimizer step."),
    "cloud": Param(None, type=TEXT, examples=["aws", "azure", "gcp"], description="Empty: all."),
    "objective": Param("cost", type="string", enum=["cost", "time"]),
    "budget_usd": Param(None, type=NUMBER, examples=[50, 500], description="Of the whole run. Empty: no limit."),
    "workspace_node_types": Param(None, type=TEXT, description="Path of the workspace's saved list-node-types."),
}


@dag(schedule=None, catchup=False, params=PARAMS, tags=["deepspeed", "plan"], doc_md=__doc__)
def plan():
    found = GpuPlanOperator(task_id="plan", **{name: f"{{{{ params.{name} }}}}" for name in PARAMS})
    approved = ApprovalOperator(
        task_id="approve",
        subject="May {{ params.model }} be fine-tuned at this price?",
        body="{{ ti.xcom_pull(task_ids='plan', key='markdown') }}",
        defaults=ApprovalOperator.REJECT,
        response_timeout=timedelta(days=1),
    )

    @task
    def show(plan):
        """Where a fine-tune would start: the cluster, and the configuration that goes with it."""
        for name in ("cluster", "deepspeed_config"):
            logging.getLogger(__name__).info("%s: %s", name, json.dumps(plan[name], indent=2))
        return plan["chosen"]

    found >> approved >> show(found.output)


plan()
