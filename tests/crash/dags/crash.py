"""Durable runs that train nothing, in all modes and on any cluster, for being killed, cleared and marked.

Where a run goes is said by the params: with ``databricks`` empty, over Spark Connect to the embedded engine.
"""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG
from deepspeed_provider.backends.base import RunRequest
from deepspeed_provider.operators.durable import DurableRunOperator

TRAINING = Path(__file__).parents[2] / "backends" / "trivial_training.py"
# Who is held waits to be killed.
HELD_SECONDS = 120


class TrivialRunOperator(DurableRunOperator):
    """Runs ``trivial_training`` on two ranks; everything else is the shipped operator's.

    :param folder: where workers and ranks say what they do.
    :param seconds: that the ranks take.
    :param hold: the moment at which the first worker that comes there waits.
    :param index: which of several mapped runs this is; its moments end with it.
    """

    template_fields = (*DurableRunOperator.template_fields, "folder", "seconds", "hold")

    def __init__(self, *, folder, seconds, hold, index="", **kwargs):
        super().__init__(**kwargs)
        self.folder = folder
        self.seconds = seconds
        self.hold = hold
        self.index = index

    def get_backend(self):
        backend = super().get_backend()
        submit = backend.submit

        def submit_and_tell(request, handle):
            self._reach("submitting")
            handle = submit(request, handle)
            self._reach("submitted")
            return handle

        backend.submit = submit_and_tell
        return backend

    def build_request(self, token, output_uri, mlflow_run_id):
        if token:
            # Nothing is stored before the first of these.
            self._reach("minting")
        return RunRequest(
            entry="trivial_training:main",
            payload={
                "name": token[:12] or "draft",
                "marks": f"{self.folder}/marks",
                "seconds": float(self.seconds),
            },
            code=(str(TRAINING),),
            output_uri=output_uri,
            gpus_per_node=2,
            use_gpu=False,
        )

    def build_output(self, record, result):
        return {**result, "generation": record.generation, "token": record.handle.token, "ids": record.handle.ids}

    def _reach(self, moment):
        """For the test, which aims by it."""
        moment = f"{moment} {self.index}".strip()
        path = Path(self.folder, "moments")
        is_first = not path.exists() or f'"{moment}"' not in path.read_text()
        with path.open("a") as moments:
            moments.write(json.dumps({"moment": moment, "pid": os.getpid()}) + "\n")
        if is_first and moment == self.hold:
            time.sleep(HELD_SECONDS)


COMMON = {
    "task_id": "run",
    "folder": "{{ params.folder }}",
    "seconds": "{{ params.seconds }}",
    "hold": "{{ params.hold }}",
    "databricks_conn_id": "{{ params.databricks }}",
    "job": "{{ params.job }}",
    "base_uri": "{{ params.base_uri }}",
    "poll_interval": 2,
    "retries": 2,
    "retry_delay": timedelta(seconds=1),
}
MODES = {
    "deferred": {"deferrable": True},
    "blocking": {"deferrable": False},
    "restart": {"deferrable": False, "on_clear": "restart"},
    "detach": {"deferrable": False, "on_worker_kill": "detach"},
    "deadline_deferred": {"deferrable": True, "timeout": timedelta(seconds=40)},
    "deadline_blocking": {"deferrable": False, "timeout": timedelta(seconds=40)},
    "mapped": {"deferrable": True},
}
PARAMS = {"folder": "", "seconds": 5, "hold": "", "databricks": "", "job": "", "base_uri": ""}

for mode, settings in MODES.items():
    with DAG(f"crash_{mode}", schedule=None, params=PARAMS) as dag:
        if mode == "mapped":
            TrivialRunOperator.partial(**COMMON, **settings).expand(index=["0", "1", "2"])
        else:
            TrivialRunOperator(**COMMON, **settings)
    globals()[dag.dag_id] = dag
