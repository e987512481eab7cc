# SPDX-License-Identifier: Apache-2.0
"""The gate between an evaluated model and the registry."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset, BaseOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from deepspeed_provider.errors import SpecError
from deepspeed_provider.operators.durable import TRACKING_VARIABLE
from deepspeed_provider.runs.tracking import mlflow_client
from deepspeed_provider.spec import FineTuneSpec

if TYPE_CHECKING:
    from airflow.sdk import Context

TOKEN_TAG = "deepspeed_provider.token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The decision about one tuned model, with the numbers that it was made from."""

    base_perplexity: float
    tuned_perplexity: float
    ratio: float
    max_ratio: float

    @property
    def passed(self) -> bool:
        # Written so that a ratio that is no number does not pass.
        return self.ratio < self.max_ratio

    def __str__(self) -> str:
        verdict = "better than" if self.passed else "not better than"
        return (
            f"Held-out perplexity {self.tuned_perplexity:.4g} after and {self.base_perplexity:.4g} before: "
            f"ratio {self.ratio:.3f}, {verdict} the {self.max_ratio:g} asked for."
        )


def gate(evaluation: Mapping[str, Any], max_ratio: float) -> Gate:
    """The decision about what ``DeepSpeedEvaluateOperator`` returned. Raises KeyError for anything else."""
    metrics = evaluation["metrics"]
    return Gate(
        base_perplexity=float(metrics["base_perplexity"]),
        tuned_perplexity=float(metrics["tuned_perplexity"]),
        ratio=float(metrics["perplexity_ratio"]),
        max_ratio=max_ratio,
    )


class RegisterModelOperator(BaseOperator):
    """Registers a tuned model in MLflow when it is better than its base by what the spec asks for.

    Returns name, version, alias and the perplexities, and puts the same into the events of its ``Asset``
    outlets. A repeated try finds the version that an earlier one has made.

    :param spec: a mapping of ``FineTuneSpec``'s fields.
    :param finetuned: what ``DeepSpeedFineTuneOperator`` returned.
    :param evaluation: what ``DeepSpeedEvaluateOperator`` returned.
    :param alias: set on the new version.
    :param on_reject: ``fail`` the task when the model is not better, or ``skip`` it.
    :param tracking_uri: MLflow server with the registry; default: the environment's
        ``MLFLOW_TRACKING_URI``.
    """

    template_fields: Sequence[str] = ("spec", "finetuned", "evaluation", "alias", "tracking_uri")

    def __init__(
        self,
        *,
        spec: Mapping[str, Any],
        finetuned: Mapping[str, Any],
        evaluation: Mapping[str, Any],
        alias: str = "champion",
        on_reject: str = "fail",
        tracking_uri: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if on_reject not in ("fail", "skip"):
            raise ValueError(f"on_reject = {on_reject!r}: should be 'fail' or 'skip'.")
        self.spec = spec
        self.finetuned = finetuned
        self.evaluation = evaluation
        self.alias = alias
        self.on_reject = on_reject
        self.tracking_uri = tracking_uri

    def execute(self, context: Context) -> dict[str, Any]:
        try:
            spec = FineTuneSpec.from_params(self.spec)
        except SpecError as error:
            raise AirflowFailException(str(error)) from error
        decision = gate(self.evaluation, spec.max_perplexity_ratio)
        self.log.info("%s", decision)
        if not decision.passed:
            text = f"The model is not registered. {decision}"
            raise (AirflowFailException if self.on_reject == "fail" else AirflowSkipException)(text)
        if spec.registered_model_name is None:
            raise AirflowSkipException("The model passed, but registered_model_name is empty: it is not registered.")
        version = self._register(spec.registered_model_name)
        result = {
            "name": spec.registered_model_name,
            "version": version,
            "alias": self.alias,
            "model_uri": f"models:/{spec.registered_model_name}@{self.alias}",
            "base_model": spec.model,
            "base_perplexity": decision.base_perplexity,
            "tuned_perplexity": decision.tuned_perplexity,
            "perplexity_ratio": decision.ratio,
            "mlflow_run_id": self.finetuned.get("mlflow_run_id"),
            "dataset_uri": self.finetuned.get("dataset_uri"),
        }
        for outlet in self.outlets:
            if isinstance(outlet, Asset):
                context["outlet_events"][outlet].extra = result
        self.log.info("Registered as %s version %s, alias %r.", result["name"], version, self.alias)
        return result

    def _register(self, name: str) -> str:
        """The version of the model in the registry, made if there is none."""
        uri = self.tracking_uri or os.environ.get(TRACKING_VARIABLE)
        model_uri = self.finetuned.get("mlflow_model_uri")
        if not uri or not model_uri:
            missing = f"no MLflow server ({TRACKING_VARIABLE} is not set)" if not uri else "no MLflow model of the run"
            raise AirflowFailException(
                f"There is {missing}, so {name!r} cannot be registered. The model itself is in "
                f"{self.finetuned.get('model_uri')}."
            )
        client = mlflow_client(uri)
        version = self._known_version(client, name) or self._new_version(uri, name, model_uri)
        client.set_registered_model_alias(name, self.alias, version)
        return version

    def _known_version(self, client: Any, name: str) -> str | None:
        found = client.search_model_versions(f"name = '{name}'")
        return next((str(v.version) for v in found if v.tags.get(TOKEN_TAG) == self.finetuned["token"]), None)

    def _new_version(self, uri: str, name: str, model_uri: str) -> str:
        import mlflow

        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
        tags = {TOKEN_TAG: self.finetuned["token"]}
        return str(mlflow.register_model(model_uri, name, tags=tags).version)
