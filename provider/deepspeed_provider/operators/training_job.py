# SPDX-License-Identifier: Apache-2.0
"""The base of training operators: a spec on a data set, and the hardware that it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from deepspeed_provider.backends.base import RunRequest
from deepspeed_provider.backends.workspace_files import WorkspaceFiles, path_of
from deepspeed_provider.errors import FieldProblem, SpecError, tried
from deepspeed_provider.handed_plan import AUTO, HandedPlan, read_object, read_plan
from deepspeed_provider.hooks.platforms import platform_of
from deepspeed_provider.operators import rendered
from deepspeed_provider.operators.durable import DurableRunOperator
from deepspeed_provider.operators.plan import is_blank, plan_in_task
from deepspeed_provider.operators.record_store import TaskStateRecordStore
from deepspeed_provider.planning import Hardware, Plan, plan
from deepspeed_provider.spec import FineTuneSpec
from deepspeed_provider.training.code_archive import training_code
from deepspeed_provider.training.plan import TrackingSettings, TrainingPlan

if TYPE_CHECKING:
    from airflow.sdk import Context

    from deepspeed_provider.backends.jobs_body import JobSettings
    from deepspeed_provider.runs.job import Job

ENTRY = "deepspeed_provider.training.launcher:main"
# Beside the record of the run in the task state store.
PLAN_KEY = "plan"
# A plan decides how a step is split.
UNSPLIT: Mapping[str, Any] = MappingProxyType({"micro_batch_size": None, "gradient_accumulation_steps": None})


class TrainingJobOperator(DurableRunOperator):
    """What fine-tune and evaluation share: a spec, a data set, and the hardware they run on.

    Through the Jobs API (``databricks_conn_id``) a plan brings the hardware: its cluster is made for the run and tagged
    with dag, run and task, the spec's ranks follow it, and the task installs what the runtime lacks. Where ``job``
    names an ``existing_cluster_id`` or a ``cluster``, that is used, and spec, ``nodes`` and ``use_gpu`` say what it
    has, unless a plan for machines that are there does. The output has ``billed_seconds`` and ``cost_usd`` too, by the
    time that the cluster really was there.

    :param spec: a mapping of ``FineTuneSpec``'s fields, or one of its objects.
    :param dataset: what ``PrepareDatasetOperator`` returned, or the URI of such a folder.
    :param plan: what ``GpuPlanOperator`` returned, also as JSON. Or ``auto``: the task plans by itself, as that
        operator does, for what the workspace has now; a run that is taken up again keeps its plan. Over Spark Connect
        and on a cluster of your own it plans for the ``hardware`` of ``plan_options``.
    :param plan_options: of that planning, by the parameters of ``GpuPlanOperator``: ``budget_usd``,
        ``single_user_name``, ``node_type``, ``hardware``, …; also ``model`` or ``parameters`` where the spec's model is
        a folder that this machine does not read, ``rows`` for a data set that is not described, and ``download``.
    :param nodes: machines that the spec's ranks are shared by.
    :param use_gpu: train on GPUs; False trains on CPU.
    """

    template_fields: Sequence[str] = (
        *DurableRunOperator.template_fields,
        *("spec", "dataset", "plan", "plan_options", "use_gpu"),
    )

    def __init__(
        self,
        *,
        spec: Mapping[str, Any] | FineTuneSpec,
        dataset: Mapping[str, Any] | str,
        plan: Mapping[str, Any] | str | None = None,
        plan_options: Mapping[str, Any] | None = None,
        nodes: int = 1,
        use_gpu: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spec = spec
        self.dataset = dataset
        self.plan = plan
        self.plan_options = plan_options
        self.nodes = nodes
        self.use_gpu: Any = use_gpu
        self._plan: Plan | None = None
        self._handed: HandedPlan | None = None
        self._job_settings: JobSettings | None = None

    def read_templates(self) -> None:
        super().read_templates()
        self.use_gpu = rendered.switch("use_gpu", self.use_gpu)
        self.plan = rendered.plan(self.plan)
        self.plan_options = rendered.plan_options(self.plan_options)

    def get_hardware(self, spec: FineTuneSpec) -> Hardware:
        """The machines that the run will find."""
        platform = platform_of(self.spark_connect_conn_id, self.databricks_conn_id)
        return platform.get_hardware(ranks=spec.ranks, nodes=self.nodes, use_gpu=self.use_gpu)

    def get_spec(self, **changes: Any) -> FineTuneSpec:
        """What is asked for. Raises :class:`SpecError`."""
        asked = self.spec.to_params() if isinstance(self.spec, FineTuneSpec) else self.spec
        return FineTuneSpec.from_params({**asked, **changes} if isinstance(asked, Mapping) else asked)

    def get_plan(self) -> Plan:
        """The plan of the spec, made once per execution and shown with its reasons."""
        if self._plan is None:
            if self._handed is None:
                spec = self.get_spec()
                self._plan = self.make_plan(spec, self.get_hardware(spec))
            else:
                self._plan = self.make_plan(self.spec_on(self._handed), self._handed.hardware)
            self.log.info("Plan:\n%s", "\n".join(f"  {reason}" for reason in self._plan.reasons))
        return self._plan

    def spec_on(self, plan: HandedPlan) -> FineTuneSpec:
        """The spec with the ranks of the plan's cluster."""
        return self.get_spec(ranks=plan.hardware.ranks, **UNSPLIT)

    def get_given_plan(self) -> Mapping[str, Any] | str | None:
        """The plan that was handed over, ``auto``, or None."""
        return None if is_blank(self.plan) else self.plan

    def get_job_settings(self) -> JobSettings:
        return self._job_settings or super().get_job_settings()

    def get_usd_per_hour(self) -> float | None:
        return None if self._handed is None else self._handed.chosen.usd_per_hour

    def _job(self, context: Context) -> Job:
        # Before anything is minted: what cannot run leaves no trace.
        self._refuse_what_cannot_run()
        self._handed = self._plan_on_given(context)
        if self.databricks_conn_id:
            self._choose_cluster(context)
        return super()._job(context)

    def _refuse_what_cannot_run(self) -> None:
        """Raises :class:`SpecError` with all that is wrong with what was given, as far as this machine can tell."""
        problems: list[FieldProblem] = []
        tried(self.get_spec, problems)
        if self.databricks_conn_id:
            tried(super().get_job_settings, problems)
        if self.plan != AUTO or self.get_given_plan() == AUTO:
            problems += problems_of_planning(self.plan, self.plan_options, self.databricks_conn_id, self.job)
        if problems:
            raise SpecError(problems)

    def _plan_on_given(self, context: Context) -> HandedPlan | None:
        """The plan for machines that are there: made by the task, or handed over; None for any other."""
        given = self.get_given_plan()
        if given == AUTO:
            return None if hardware_of(self.plan_options) is None else self._auto_plan(context)
        handed = None if given is None else read_plan(given)
        return None if handed is None or handed.cluster is not None else handed

    def _choose_cluster(self, context: Context) -> None:
        from deepspeed_provider.clusters.cluster_body import RunIdentity
        from deepspeed_provider.operators import planned_cluster

        settings, given = super().get_job_settings(), self._handed or self.get_given_plan()
        planned_cluster.require_cluster(self.job, given)
        if planned_cluster.own_cluster(self.job) is None:
            self._handed = self._auto_plan(context) if given == AUTO else read_plan(given)
            planned_cluster.require_trainable(self._handed)
            ti = context["ti"]
            run = RunIdentity(dag_id=ti.dag_id, run_id=ti.run_id, task_id=ti.task_id)
            settings = planned_cluster.on_planned_cluster(settings, self._handed, run)
        method = self.get_plan().spec.method.value
        self._job_settings = planned_cluster.with_libraries(settings, method)

    def _auto_plan(self, context: Context) -> HandedPlan:
        """The plan of the run that is alive; else a new one, kept beside the record of the run that it is for.

        The workspace is not asked again for a run that is there: that run may have what was free before.
        """
        from deepspeed_provider.requested.finetune import planning_request

        store, record = context["task_state_store"], TaskStateRecordStore(context).load()
        kept = store.get(PLAN_KEY)
        if kept is not None and record is not None and record.outcome is None:
            return read_plan(kept)
        options = self.plan_options or {}
        request = planning_request(self.get_spec(ranks=1, **UNSPLIT), self.dataset, options)
        if not {"rows", "tokens"} & set(request):
            text = "is needed: nothing else says how long the training is, as rows of an address are not counted"
            works = "Give it, or the dataset as PrepareDatasetOperator returns it, or plan_options={'rows': …}."
            raise SpecError.of("max_steps", None, text, works)
        folder = path_of(str(request.get("model", "")))
        if self.databricks_conn_id and folder is not None and not {"model", "parameters"} & set(options):
            request["model"] = self._config_in_workspace(folder)
        download = bool(options.get("download", False))
        workspace = self.databricks_conn_id if hardware_of(options) is None else None
        found = read_plan(plan_in_task(request, context, self.log, databricks_conn_id=workspace, download=download))
        store.set(PLAN_KEY, found.to_json())
        return found

    def _config_in_workspace(self, folder: str) -> dict[str, Any]:
        """Of a model in a folder of the workspace, which this machine does not see."""
        from deepspeed_provider.hooks.databricks import DatabricksWorkspaceHook

        files = WorkspaceFiles(DatabricksWorkspaceHook(self.databricks_conn_id or ""))
        try:
            return read_object(files.read(f"{folder.rstrip('/')}/config.json").decode(), "model", "Check the folder.")
        except FileNotFoundError:
            works = "Give a folder with the config.json that transformers writes."
            raise SpecError.of("model", folder, "has no config.json in the workspace", works) from None

    def make_plan(self, spec: FineTuneSpec, hardware: Hardware) -> Plan:
        """Settings that suit the hardware. Raises :class:`SpecError` where there are none."""
        return plan(spec, hardware)

    @property
    def dataset_uri(self) -> str:
        uri = self.dataset if isinstance(self.dataset, str) else self.dataset.get("dataset_uri")
        if not uri:
            raise AirflowFailException(
                f"dataset = {self.dataset!r}: neither a URI nor what PrepareDatasetOperator returns."
            )
        return str(uri)

    def _tracking(self, mlflow_run_id: str | None) -> TrackingSettings | None:
        uri = self.get_tracking_uri()
        return TrackingSettings(tracking_uri=uri, run_id=mlflow_run_id) if uri and mlflow_run_id else None

    def _places(self, token: str, output_uri: str, mlflow_run_id: str | None) -> dict[str, Any]:
        return {
            "token": token,
            "dataset_uri": self.dataset_uri,
            "output_uri": output_uri,
            "cache_uri": f"{self.get_base_uri()}/cache",
            "tracking": self._tracking(mlflow_run_id),
        }

    def _request(self, training: TrainingPlan) -> RunRequest:
        hardware = self.get_plan().hardware
        return RunRequest(
            entry=ENTRY,
            payload=training.to_json(),
            code=training_code(),
            output_uri=training.output_uri,
            nodes=hardware.nodes,
            gpus_per_node=hardware.gpus_per_node,
            use_gpu=hardware.use_gpu,
            deepspeed_config=training.deepspeed_config or None,
        )


def hardware_of(plan_options: Any) -> Any:
    """What the options of a plan say of machines that are there; None where they are yet to be chosen."""
    found = plan_options.get("hardware") if isinstance(plan_options, Mapping) else None
    return None if is_blank(found) else found


def problems_of_planning(
    plan: Any, plan_options: Mapping[str, Any] | None, databricks_conn_id: str | None, job: Mapping[str, Any] | None
) -> list[FieldProblem]:
    """Of a plan of the task's own: there is nothing that it could be for, or no cluster that has such machines."""
    from deepspeed_provider.operators.planned_cluster import own_cluster

    def problem(field: str, value: Any, text: str, works: str) -> list[FieldProblem]:
        return [FieldProblem(field=field, value=value, problem=text, suggestion=works)]

    if plan != AUTO:
        text, works = "are for planning, and nothing is planned here", "Give plan='auto', or leave them out."
        return problem("plan_options", plan_options, text, works) if plan_options else []
    hardware, workspace = hardware_of(plan_options), bool(databricks_conn_id)
    if hardware is None and not workspace:
        text = "asks a workspace what it has, and none is named"
        works = (
            "Give databricks_conn_id, or the machines as plan_options={'hardware': {'gpu': 'A100-80GB', "
            "'gpus_per_node': 8}}, or leave the plan out: settings then follow the hardware."
        )
        return problem("plan", AUTO, text, works)
    if hardware is not None and workspace and own_cluster(job) is None:
        text, works = "is of a cluster that is there, and job names none", "Give job={'existing_cluster_id': …}."
        return problem("plan_options.hardware", hardware, text, works)
    return []
