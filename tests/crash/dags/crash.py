"""A durable run that trains nothing, in both modes, for being killed, cleared and marked."""

import os
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG
from deepspeed_provider.backends.base import RunRequest
from deepspeed_provider.operators.durable import DurableRunOperator

TRAINING = Path(__file__).parents[2] / "backends" / "trivial_training.py"


class TrivialRunOperator(DurableRunOperator):
    """Runs ``trivial_training`` on two ranks; everything else is the shipped operator's."""

    template_fields = (*DurableRunOperator.template_fields, "folder", "seconds")

    def __init__(self, *, folder, seconds, **kwargs):
        super().__init__(**kwargs)
        self.folder = folder
        self.seconds = seconds

    def build_request(self, token, output_uri, mlflow_run_id):
        if token:
            # So that the test can aim: this process is about to mint and then to submit.
            with Path(self.folder, "worker-pids").open("a") as pids:
                pids.write(f"{os.getpid()}\n")
        name = token[:12] or "draft"
        return RunRequest(
            entry="trivial_training:main",
            payload={"name": name, "marks": f"{self.folder}/marks", "seconds": float(self.seconds)},
            code=(str(TRAINING),),
            output_uri=output_uri,
            gpus_per_node=2,
            use_gpu=False,
        )

    def build_output(self, record, result):
        return {"generation": record.generation, "operation_id": record.handle.ids["operation_id"], **result}


for mode, settings in {
    "deferred": {"deferrable": True},
    "blocking": {"deferrable": False},
    "restart": {"deferrable": False, "on_clear": "restart"},
    "deadline_deferred": {"deferrable": True, "timeout": timedelta(seconds=40)},
    "deadline_blocking": {"deferrable": False, "timeout": timedelta(seconds=40)},
}.items():
    with DAG(f"crash_{mode}", schedule=None, params={"folder": "", "seconds": 5}) as dag:
        TrivialRunOperator(
            task_id="run",
            folder="{{ params.folder }}",
            seconds="{{ params.seconds }}",
            base_uri="{{ 'file://' ~ params.folder ~ '/out' }}",
            poll_interval=2,
            retries=2,
            retry_delay=timedelta(seconds=1),
            **settings,
        )
    globals()[dag.dag_id] = dag
