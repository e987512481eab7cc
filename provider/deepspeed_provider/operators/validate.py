# SPDX-License-Identifier: Apache-2.0
"""Validation of the request, before anything costs time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from deepspeed_provider.backends.jobs_body import job_settings
from deepspeed_provider.backends.workspace_files import VOLUMES, path_of
from deepspeed_provider.errors import FieldProblem, SpecError, tried
from deepspeed_provider.handed_plan import AUTO, read_plan
from deepspeed_provider.hooks.platforms import platform_of
from deepspeed_provider.hooks.spark_connect import SparkConnectHook
from deepspeed_provider.operators import rendered
from deepspeed_provider.operators.durable import TRACKING_VARIABLE
from deepspeed_provider.operators.plan import read_hardware, read_options
from deepspeed_provider.operators.training_job import UNSPLIT, hardware_of, problems_of_planning
from deepspeed_provider.params import HARDWARE, PLACE
from deepspeed_provider.planning import plan
from deepspeed_provider.requested.model_source import ModelSource
from deepspeed_provider.spec import FineTuneSpec

if TYPE_CHECKING:
    from airflow.sdk import Context

# Catalog, schema and volume, and no way out of them.
IN_VOLUME: Final = re.compile(r"/Volumes(/(?!\.\.?(/|$))[^/]+){3,}/?")


class ValidateSpecOperator(rendered.KeepsReferences, BaseOperator):
    """Checks a whole request before anything costs time: every problem of every field, at once.

    Returns the spec as JSON for the tasks after it, and shows the plan with its reasons. Through the Jobs API the
    workspace is not asked: what only it knows, the runs' own tasks check before they submit.

    :param databricks_conn_id, base_uri, job, plan, nodes, use_gpu: as for the fine-tune.
    :param plan_options, tracking_uri: the same. For ``hardware`` that is there it is planned already here.
    :param trains: False where data is only prepared: no hardware is looked at, and no cluster for ranks is missed.
    :param other_params: params of the DAG that are neither fields of a spec nor those of ``place_params``.
    """

    template_fields: Sequence[str] = (
        *("spark_connect_conn_id", "databricks_conn_id", "base_uri", "job", "plan", "plan_options", "use_gpu"),
        "tracking_uri",
    )

    def __init__(
        self,
        *,
        spark_connect_conn_id: str = SparkConnectHook.default_conn_name,
        databricks_conn_id: str | None = None,
        base_uri: str | None = None,
        job: Mapping[str, Any] | str | None = None,
        plan: Mapping[str, Any] | str | None = None,
        plan_options: Mapping[str, Any] | None = None,
        tracking_uri: str | None = None,
        nodes: int = 1,
        use_gpu: bool | str = False,
        trains: bool = True,
        other_params: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spark_connect_conn_id = spark_connect_conn_id
        self.databricks_conn_id = databricks_conn_id
        self.base_uri = base_uri
        self.job: Any = job
        self.plan = plan
        self.plan_options = plan_options
        self.tracking_uri = tracking_uri
        self.nodes = nodes
        self.use_gpu: Any = use_gpu
        self.trains = trains
        self.other_params = other_params

    def execute(self, context: Context) -> dict[str, Any]:
        ours = {*PLACE, *HARDWARE, *self.other_params}
        params = {name: value for name, value in context["params"].items() if name not in ours}
        problems: list[FieldProblem] = []
        spec = tried(lambda: FineTuneSpec.from_params(params), problems)
        if not _problems_of(self._read_templates, problems):
            _problems_of(self._require_place, problems)
        if spec is not None:
            _problems_of(lambda: self._require_spec_here(spec), problems)
        try:
            if problems or spec is None:
                raise SpecError(problems)
            for reason in self._reasons(spec):
                self.log.info("%s", reason)
        except SpecError as error:
            raise AirflowFailException(str(error)) from error
        return spec.to_params()

    def _read_templates(self) -> None:
        self.databricks_conn_id = rendered.text(self.databricks_conn_id)
        self.base_uri = rendered.text(self.base_uri)
        self.plan = rendered.plan(self.plan)
        found: list[FieldProblem] = []
        self.job = tried(lambda: rendered.job(self.job), found)
        self.plan_options = tried(lambda: rendered.plan_options(self.plan_options), found)
        self.use_gpu = bool(tried(lambda: rendered.switch("use_gpu", self.use_gpu), found))
        if found:
            raise SpecError(found)

    def _require_place(self) -> None:
        """Raises :class:`SpecError` with all that is wrong with where it is to run."""
        if not self.databricks_conn_id:
            self._require_none_of_workspace()
            return
        found: list[FieldProblem] = []
        each = (self._require_connection, self._require_folder, self._require_job, self._require_plan)
        for require in (*each, self._require_options):
            _problems_of(require, found)
        if found:
            raise SpecError(found)

    def _require_none_of_workspace(self) -> None:
        """A connection that was forgotten must not let the run go elsewhere."""
        found: list[FieldProblem] = []
        found += problems_of_planning(self.plan, self.plan_options, None, self.job)
        if self.job:
            found += rendered.job_without_workspace(self.job).problems
        if (self.base_uri or "").startswith(VOLUMES):
            works = "Give databricks_conn_id, or a folder that the Spark Connect server can write."
            found += SpecError.of("base_uri", self.base_uri, "is in a workspace, and none is named", works).problems
        if found:
            raise SpecError(found)

    def _require_connection(self) -> None:
        from deepspeed_provider.hooks.databricks import require_databricks

        require_databricks("databricks_conn_id", str(self.databricks_conn_id))

    def _require_spec_here(self, spec: FineTuneSpec) -> None:
        """Raises :class:`SpecError` for what a spec asks of this place that cannot be had in it."""
        if not self.trains:
            return
        name = spec.registered_model_name
        if name and not (self.tracking_uri or os.environ.get(TRACKING_VARIABLE)):
            text = f"cannot be registered: there is no MLflow server ({TRACKING_VARIABLE} is not set)"
            works = "Set it where tasks run, to 'databricks' for a workspace's own, or leave the name empty."
            raise SpecError.of("registered_model_name", name, text, works)
        # A folder of the workspace is read when it is planned.
        in_workspace = bool(self.databricks_conn_id) and path_of(spec.model) is not None
        if self.plan == AUTO and not in_workspace and not _tells_model(self.plan_options):
            ModelSource().model(spec.model)

    def _require_folder(self) -> None:
        works = "Give a folder of a Volume that the run may write, such as /Volumes/main/default/fine-tunes."
        if self.base_uri is None:
            raise SpecError.of("base_uri", None, "is needed with databricks_conn_id", works)
        if self.base_uri.startswith(VOLUMES) and not IN_VOLUME.fullmatch(self.base_uri):
            raise SpecError.of("base_uri", self.base_uri, "is no folder of a Volume", works)
        if path_of(self.base_uri) is None and not (self.job or {}).get("code_folder"):
            text = "is storage that the workspace does not read, and job has no code_folder"
            raise SpecError.of("base_uri", self.base_uri, text, works)

    def _require_job(self) -> None:
        from deepspeed_provider.operators import planned_cluster

        job_settings({"code_folder": "", **(self.job or {})})
        if not self.trains:
            return
        problems = problems_of_planning(self.plan, self.plan_options, self.databricks_conn_id, self.job)
        if problems:
            raise SpecError(problems)
        if self.plan != AUTO or hardware_of(self.plan_options) is None:
            planned_cluster.require_cluster(self.job, self.plan)

    def _require_plan(self) -> None:
        from deepspeed_provider.operators import planned_cluster

        if self.plan not in (None, AUTO) and planned_cluster.own_cluster(self.job) is None:
            planned_cluster.require_trainable(read_plan(self.plan))

    def _require_options(self) -> None:
        """Those of machines that are there are judged with the spec, when it is planned for them."""
        from deepspeed_provider.requested.finetune import require_options

        if self.trains and self.plan == AUTO and self.plan_options and hardware_of(self.plan_options) is None:
            require_options(read_options(self.plan_options))

    def _reasons(self, spec: FineTuneSpec) -> Sequence[str]:
        """What will run and why, as far as it can be known. Raises :class:`SpecError`."""
        from deepspeed_provider.handover import plan_with_gpu_plan
        from deepspeed_provider.operators import planned_cluster

        if not self.trains:
            return ()
        if self.plan == AUTO:
            hardware = hardware_of(self.plan_options)
            if hardware is not None:
                return self._reasons_on(hardware, spec)
            where = f"the workspace of {self.databricks_conn_id!r}"
            return (f"The fine-tune plans when it starts, for what {where} has then; its ranks follow that plan.",)
        handed = None if self.plan is None else read_plan(self.plan)
        is_made = self.databricks_conn_id and planned_cluster.own_cluster(self.job) is None
        if handed is not None and (is_made or handed.cluster is None):
            changed = {**spec.to_params(), **UNSPLIT, "ranks": handed.hardware.ranks}
            return plan_with_gpu_plan(FineTuneSpec.from_params(changed), handed.hardware, handed).reasons
        platform = platform_of(self.spark_connect_conn_id, self.databricks_conn_id)
        hardware = platform.get_hardware(ranks=spec.ranks, nodes=self.nodes, use_gpu=self.use_gpu)
        return (plan(spec, hardware) if self.plan is None else plan_with_gpu_plan(spec, hardware, self.plan)).reasons

    def _reasons_on(self, hardware: Any, spec: FineTuneSpec) -> Sequence[str]:
        """What a plan for these machines says already now, before the data is counted."""
        from deepspeed_provider.clusters.given import Fitted
        from deepspeed_provider.plan_texts import given_text, settings_text
        from deepspeed_provider.requested.finetune import planning_request
        from deepspeed_provider.requested.given import described_hardware, planned_on_hardware

        described = read_hardware(hardware)
        options = {name: value for name, value in (self.plan_options or {}).items() if name != "hardware"}
        request = planning_request(FineTuneSpec.from_params({**spec.to_params(), **UNSPLIT, "ranks": 1}), {}, options)
        if options.get("download") or (self.databricks_conn_id and path_of(str(request.get("model", "")))):
            # Only the fine-tune reads the model.
            machines = given_text(described_hardware(described)[0])
            return (f"The fine-tune plans when it starts, for {machines}; its ranks follow that plan.",)
        if not {"rows", "tokens"} & set(request):
            request["rows"] = 1
        found = planned_on_hardware(request, described, ModelSource())
        machines = given_text(found.plan.hardware)
        if not isinstance(found.plan.fitted, Fitted):
            text = f"is too little for {found.model}: {found.plan.fitted}"
            raise SpecError.of("hardware", machines, text, "Name other machines, or ask for less.")
        return (f"On {machines}: {settings_text(found.plan.fitted)}; ranks follow.",)


def _tells_model(plan_options: Any) -> bool:
    return isinstance(plan_options, Mapping) and bool({"model", "parameters", "download"} & set(plan_options))


def _problems_of(check: Callable[[], None], problems: list[FieldProblem]) -> bool:
    """Whether ``check`` raised :class:`SpecError`; its problems are added to the list."""
    before = len(problems)
    tried(check, problems)
    return len(problems) > before
