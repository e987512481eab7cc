# SPDX-License-Identifier: Apache-2.0
"""The fine-tune and its evaluation as durable runs on the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from deepspeed_provider.backends.base import RunRequest
from deepspeed_provider.handed_plan import AUTO, Chosen, HandedPlan, Settings
from deepspeed_provider.operators.plan import read_hardware
from deepspeed_provider.operators.training_job import UNSPLIT, TrainingJobOperator, hardware_of
from deepspeed_provider.planning import Hardware, Plan, evaluation_plan, finetune_plan
from deepspeed_provider.runs.tracking import SharedTracker
from deepspeed_provider.spec import FineTuneSpec
from deepspeed_provider.training.plan import EvaluationSettings

if TYPE_CHECKING:
    from airflow.sdk import Context

    from deepspeed_provider.runs.job import Tracker
    from deepspeed_provider.runs.record import RunRecord


class DeepSpeedFineTuneOperator(TrainingJobOperator):
    """Fine-tunes a causal language model with DeepSpeed.

    Returns the run's result (``metrics``, ``model_uri``, ``mlflow_model_uri``, …) with ``output_uri``,
    ``dataset_uri``, ``mlflow_run_id`` and ``mlflow_url``; with ``plan`` too, where its cluster was made for the run, or
    where it is for machines that are there.

    :param plan: its precision, ZeRO stage, offload, batch and checkpointing are used. The plan of a cluster to be made
        can be used on one that is there (over Spark Connect, or an existing cluster) where that is just the same: the
        spec's ``ranks``, ``nodes``, ``use_gpu``. Without a plan settings follow the hardware.
    :param deepspeed_config: instead, a configuration of your own, as a mapping or JSON. It is checked, and used as it
        is; an error that the checker finds fails the task before anything is submitted.
    """

    template_fields: Sequence[str] = (*TrainingJobOperator.template_fields, "deepspeed_config")

    def __init__(self, *, deepspeed_config: Mapping[str, Any] | str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.plan is not None and deepspeed_config is not None:
            raise ValueError("plan and deepspeed_config: a plan has its own configuration. Give one of them.")
        self.deepspeed_config = deepspeed_config

    def make_plan(self, spec: FineTuneSpec, hardware: Hardware) -> Plan:
        # The checker is not needed for parsing a DAG.
        from deepspeed_provider.handover import plan_with_config, plan_with_gpu_plan

        given = self._handed or self.get_given_plan()
        if given is not None:
            return plan_with_gpu_plan(spec, hardware, given)
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
            **({} if self._handed is None else {"plan": self._handed.to_json()}),
        }


class DeepSpeedEvaluateOperator(TrainingJobOperator):
    """Compares base and tuned model on the held-out split, on the cluster, in the fine-tune's MLflow run.

    :param finetuned: what ``DeepSpeedFineTuneOperator`` returned, or the URI of a model folder.
    :param plan: of its cluster; the settings in it are for training, and are not used. Left out, or ``auto``, the
        evaluation gets a cluster as the fine-tune had, where that was planned; ``plan_options`` with ``hardware`` are
        for machines of its own.
    """

    template_fields: Sequence[str] = (*TrainingJobOperator.template_fields, "finetuned")

    def __init__(self, *, finetuned: Mapping[str, Any] | str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.finetuned = finetuned

    def get_given_plan(self) -> Mapping[str, Any] | str | None:
        given = super().get_given_plan()
        tuned: Mapping[str, Any] | None = None if isinstance(self.finetuned, str) else self.finetuned.get("plan")
        if tuned is None or given not in (None, AUTO) or hardware_of(self.plan_options) is not None:
            return given
        return tuned

    def _plan_on_given(self, context: Context) -> HandedPlan | None:
        hardware = hardware_of(self.plan_options)
        if hardware is None or self.get_given_plan() != AUTO:
            return super()._plan_on_given(context)
        # Nothing is trained: it need not fit there as a training does.
        return self._untrained_plan(read_hardware(hardware))

    def _untrained_plan(self, hardware: Mapping[str, Any]) -> HandedPlan:
        from deepspeed_provider.requested.given import described_hardware

        machines, usd_per_hour = described_hardware(hardware)
        spec = self.get_spec(ranks=machines.world_size, gradient_accumulation_steps=None, effective_batch_size=None)
        settings = Settings(
            nodes=machines.nodes,
            gpus_per_node=machines.gpus_per_node,
            micro_batch_size=spec.micro_batch_size or 1,
            gradient_checkpointing=False,
        )
        return HandedPlan(
            model=spec.model,
            method=spec.method.value,
            lora_rank=None,
            optimizer="adamw",
            sequence_length=spec.sequence_length,
            effective_batch_size=machines.world_size,
            chosen=Chosen(gpu=machines.gpu.name, settings=settings, usd_per_hour=usd_per_hour),
            deepspeed_config={},
        )

    def spec_on(self, plan: HandedPlan) -> FineTuneSpec:
        # Nothing steps here: there is a batch for each rank, and none over all.
        batch = {"micro_batch_size": plan.chosen.settings.micro_batch_size, "effective_batch_size": None}
        return self.get_spec(ranks=plan.hardware.ranks, **{**UNSPLIT, **batch})

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
