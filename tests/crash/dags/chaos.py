"""Durable runs through the Jobs API whose workers kill themselves where a seed says so.

The seed counts requests to the workspace and writes of the stored identity, as in virtual time
(``operators/chaos.py``): the process dies before or after the one that its try was told.
"""

import os
import signal
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG
from deepspeed_provider.backends.base import RunRequest
from deepspeed_provider.backends.databricks_jobs import DatabricksJobsBackend
from deepspeed_provider.hooks.databricks import DatabricksWorkspaceHook
from deepspeed_provider.operators.durable import DurableRunOperator
from operators.workspace_task import WatchedWire


class WatchedStore:
    """A task state store whose process may die before or after any write."""

    def __init__(self, store, on_call):
        self._store = store
        self._on_call = on_call

    def __getattr__(self, verb):
        return getattr(self._store, verb)

    def set(self, *arguments, **options):
        self._on_call("store", "before")
        self._store.set(*arguments, **options)
        self._on_call("store", "after")


class DoomedOperator(DurableRunOperator):
    """The operator as it ships, but for what it runs and for when its process dies.

    :param folder: where its processes count their instructions, a file for each try.
    :param deaths: of each try, the number of the instruction that is its last, or None.
    """

    template_fields = (*DurableRunOperator.template_fields, "folder", "deaths")

    def __init__(self, *, folder, deaths, **kwargs):
        super().__init__(**kwargs)
        self.folder = folder
        self.deaths = deaths
        self._count = None

    def execute(self, context):
        return super().execute(self._watched(context))

    def resume(self, context, event, trigger_errors=0):
        return super().resume(self._watched(context), event, trigger_errors)

    def resume_execution(self, next_method, next_kwargs, context):
        return super().resume_execution(next_method, next_kwargs, self._watched(context))

    def get_backend(self):
        hook = DatabricksWorkspaceHook(self.databricks_conn_id)
        return DatabricksJobsBackend(WatchedWire(hook, self._on_call), self.get_job_settings())

    def build_request(self, token, output_uri, mlflow_run_id):
        return RunRequest(entry="m:f", payload={"token": token}, code=(), output_uri=output_uri)

    def build_output(self, record, result):
        return {**result, "generation": record.generation}

    def _watched(self, context):
        store = context["task_state_store"]
        self._count = Path(self.folder, f"instructions-{context['ti'].try_number}")
        if not isinstance(store, WatchedStore):
            context["task_state_store"] = WatchedStore(store, self._on_call)
        return context

    def _on_call(self, verb, moment):
        number = int(self._count.stem.rpartition("-")[2])
        last = self.deaths[number - 1] if number <= len(self.deaths) else None
        with self._count.open("ab") as count:
            count.write(b".")
            if count.tell() == last:
                count.flush()
                os.kill(os.getpid(), signal.SIGKILL)


PARAMS = {"folder": "", "deaths": [], "databricks": "", "job": "", "base_uri": ""}

for mode, deferrable in {"deferred": True, "blocking": False}.items():
    # Native, so that the deaths stay a list of numbers.
    with DAG(f"chaos_{mode}", schedule=None, params=PARAMS, render_template_as_native_obj=True) as dag:
        DoomedOperator(
            task_id="run",
            folder="{{ params.folder }}",
            deaths="{{ params.deaths }}",
            databricks_conn_id="{{ params.databricks }}",
            job="{{ params.job }}",
            base_uri="{{ params.base_uri }}",
            deferrable=deferrable,
            poll_interval=1,
            retries=2,
            retry_delay=timedelta(seconds=1),
        )
    globals()[dag.dag_id] = dag
