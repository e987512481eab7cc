# SPDX-License-Identifier: Apache-2.0
"""The fine-tune and its evaluation as durable runs on the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from deepspeed_provider.backends.base import RunRequest
from deepspeed_provider.hooks.spark_connect import SparkConnectHook
from deepspeed_provider.operators.durable import DurableRunOperator
from deepspeed_provider.planning import Hardware, Plan, evaluation_plan, finetune_plan, plan
from deepspeed_provider.runs.tracking import SharedTracker
from deepspeed_provider.spec import FineTuneSpec
from deepspeed_provider.training.code_archive import training_code
from deepspeed_provider.training.plan import EvaluationSettings, TrackingSettings, TrainingPlan

if TYPE_CHECKING:
    from airflow.sdk import Context

    from deepspeed_provider.runs.job import Tracker
    from deepspeed_provider.runs.record import RunRecord

ENTRY = "deepspeed_provider.training.launcher:main"


class TrainingJobOperator(DurableRunOperator):
    """What fine-tune and evaluation share: a spec, a data set, and the hardware they run on.

    :param spec: a mapping of ``FineTuneSpec``'s fields, or one of its objects.
    :param dataset: what ``PrepareDatasetOperator`` returned, or the URI of such a folder.
    :param nodes: machines that the spec's ranks are shared by.
    :param use_gpu: train on GPUs; False trains on CPU.
    """

    template_fields: Sequence[str] = (*DurableRunOperator.template_fields, "spec", "dataset")

    def __init__(
        self,
        *,
        spec: Mapping[str, Any] | FineTuneSpec,
        dataset: Mapping[str, Any] | str,
        nodes: int = 1,
        use_gpu: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spec = spec
        self.dataset = dataset
        self.nodes = nodes
        self.use_gpu = use_gpu
        self._plan: Plan | None = None

    def get_hardware(self, spec: FineTuneSpec) -> Hardware:
        """The machines that the run will find."""
        hook = SparkConnectHook(self.spark_connect_conn_id)
        return hook.get_hardware(ranks=spec.ranks, nodes=self.nodes, use_gpu=self.use_gpu)

    def get_plan(self) -> Plan:
        """The plan of the spec, made once per execution and shown with its reasons."""
        if self._plan is None:
            spec = self.spec if isinstance(self.spec, FineTuneSpec) else FineTuneSpec.from_params(self.spec)
            self._plan = self.make_plan(spec, self.get_hardware(spec))
            self.log.info("Plan:\n%s", "\n".join(f"  {reason}" for reason in self._plan.reasons))
        return self._plan

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


class DeepSpeedFineTuneOperator(TrainingJobOperator):
    """Fine-tunes a causal language model with DeepSpeed.

    Returns the run's result (``metrics``, ``model_uri``, ``mlflow_model_uri``, …) with ``output_uri``,
    ``dataset_uri``, ``mlflow_run_id`` and ``mlflow_url``.

    :param plan: what ``GpuPlanOperator`` returned, also as JSON: its precision, ZeRO stage, offload, batch and
        checkpointing are used, if the connection's hardware (the spec's ``ranks``, ``nodes``, ``use_gpu``) is what it
        was made for. Without it settings follow the hardware.
    :param deepspeed_config: instead, a configuration of your own, as a mapping or JSON. It is checked, and used as it
        is; an error that the checker finds fails the task before anything is submitted.
    """

    template_fields: Sequence[str] = (*TrainingJobOperator.template_fields, "plan", "deepspeed_config")

    def __init__(
        self,
        *,
        plan: Mapping[str, Any] | str | None = None,
        deepspeed_config: Mapping[str, Any] | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if plan is not None and deepspeed_config is not None:
            raise ValueError("plan and deepspeed_config: a plan has its own configuration. Give one of them.")
        self.plan = plan
        self.deepspeed_config = deepspeed_config

    def make_plan(self, spec: FineTuneSpec, hardware: Hardware) -> Plan:
        # The checker is not needed for parsing a DAG.
        from deepspeed_provider.handover import plan_with_config, plan_with_gpu_plan

        if self.plan is not None:
            return plan_with_gpu_plan(spec, hardware, self.plan)
        if self.deepspeed_config is not None:
            return plan_with_config(spec, hardware, self.deepspeed_config)
        return super().make_plan(spec, hardware)

    def build_request(self, token: str, output_uri: str, mlflow_run_id: str | None) -> RunRequest:
        return self._request(finetune_plan(self.get_plan(), **self._places(token, output_uri, mlflow_run_id)))

    def build_output(self, record: RunRecord, result: Any) -> dict[str, Any]:
        return {
            **result,
            "output_uri": record.handle.output_uri,
            "dataset_uri": self.dataset_uri,
            "mlflow_run_id": record.mlflow_run_id,
            "mlflow_url": record.mlflow_url,
        }


class DeepSpeedEvaluateOperator(TrainingJobOperator):
    """Compares base and tuned model on the held-out split, on the cluster, in the fine-tune's MLflow run.

    :param finetuned: what ``DeepSpeedFineTuneOperator`` returned, or the URI of a model folder.
    """

    template_fields: Sequence[str] = (*TrainingJobOperator.template_fields, "finetuned")

    def __init__(self, *, finetuned: Mapping[str, Any] | str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.finetuned = finetuned

    def build_request(self, token: str, output_uri: str, mlflow_run_id: str | None) -> RunRequest:
        plan = self.get_plan()
        evaluation = EvaluationSettings(
            tuned_uri=self.tuned_uri, rows=plan.spec.evaluation_rows, generations=plan.spec.generations
        )
        return self._request(evaluation_plan(plan, evaluation, **self._places(token, output_uri, mlflow_run_id)))

    def build_output(self, record: RunRecord, result: Any) -> dict[str, Any]:
        return {**result, "output_uri": record.handle.output_uri, "mlflow_run_id": record.mlflow_run_id}

    def get_tracker(self, context: Context) -> Tracker:
        finetuned = {} if isinstance(self.finetuned, str) else self.finetuned
        if finetuned.get("mlflow_run_id"):
            return SharedTracker(run_id=finetuned["mlflow_run_id"], url=finetuned.get("mlflow_url"))
        return super().get_tracker(context)

    @property
    def tuned_uri(self) -> str:
        uri = self.finetuned if isinstance(self.finetuned, str) else self.finetuned.get("model_uri")
        if not uri:
            raise AirflowFailException(
                f"finetuned = {self.finetuned!r}: neither a model folder nor what DeepSpeedFineTuneOperator returns."
            )
        return str(uri)
