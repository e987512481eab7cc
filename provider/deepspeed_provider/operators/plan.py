# SPDX-License-Identifier: Apache-2.0
"""The plan of a GPU cluster inside a DAG: to be approved by people, and used by later tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.handed_plan import read_object

if TYPE_CHECKING:
    from airflow.sdk import Context

    from deepspeed_provider.clusters.workspace import WorkspaceOffers
    from deepspeed_provider.requested.model_source import ModelSource

MARKDOWN_KEY = "markdown"
# As which a template renders a Param that is empty.
NOT_GIVEN = ("", "none", "null")


class GpuPlanOperator(BaseOperator):
    """Chooses and prices a GPU cluster for a fine-tune, with its DeepSpeed configuration.

    Returns the object that ``deepspeed-provider plan --json`` prints, and pushes the same for people as Markdown
    under the key ``markdown``: the body of an approval. Fails without a retry, naming the nearest miss and what
    would make it fit, where nothing fits. Nothing is started, and nobody is asked unless a connection is named.

    Every field is templated, and numbers and switches may come as text. What renders to nothing, or to ``None``
    as an empty Param does, is not given.

    :param model: a hub id, the path of a config.json or of its folder, or a config as a mapping.
    :param parameters: instead of a model, how many parameters it has: ``7B``.
    :param tokens: of the whole run, padding included; ``50M`` works. Or ``rows``: sequences of the whole run.
    :param options: other options of the training by their names on the command line, with underscores:
        ``lora_rank``, ``attention``, ``optimizer``, ...
    :param hardware: machines that are there, of an existing cluster or behind a Spark Connect server: a mapping of
        ``gpu`` and ``gpus_per_node``, and where known ``nodes``, ``ram_gib``, ``nvme_gib``, ``interconnect_gbps``,
        ``usd_per_hour``. Then only settings are chosen, and what is for a choice of machines is refused.
    :param node_type: only these, by ids or by how ids begin: a list, or names separated by commas.
    :param catalog: rows and prices of your own over the catalogue's: a list of mappings, or the path of a CSV or JSON
        file.
    :param workspace_node_types: the workspace's answer to list-node-types, or the path of a file that holds it.
    :param databricks_conn_id: instead, Airflow's connection of type ``databricks``: its workspace is asked for its node
        types, with the quotas that Azure tells, and for its runtimes.
    :param log_volume: folder of a Volume for the cluster's logs.
    :param tags: of the cluster, beside those of dag, run and task that it has anyway: a mapping, or texts such as
        ``team=ml``.
    :param policy_id: cluster policy.
    :param instance_pool_id: pool of the nodes; ``driver_instance_pool_id``: of the driver, where that is another.
    :param single_user_name: whose cluster it is.
    :param script_folder: folder of init scripts; ``model_cache_volume``: folder of a Volume where models stay.
    :param spark_version: key of a runtime; else the newest with long-term support, that the workspace has where it is
        asked.
    :param objective: ``cost`` of the whole run, or ``time``.
    :param top: rows of the table.
    :param download: fetch the config of a hub id that is not bundled.
    """

    template_fields: Sequence[str] = (
        *("model", "parameters", "method", "sequence_length", "options", "tokens", "rows", "effective_batch_size"),
        *("cloud", "region", "node_type", "min_compute_capability", "max_nodes", "spot", "tier"),
        *("catalog", "workspace_node_types"),
        *("log_volume", "tags", "policy_id", "instance_pool_id", "driver_instance_pool_id"),
        *("single_user_name", "script_folder", "model_cache_volume", "spark_version"),
        *("objective", "max_usd_per_hour", "budget_usd", "deadline_hours", "top"),
        *("hardware", "databricks_conn_id"),
    )
    ui_color = "#e6f2e6"

    def __init__(
        self,
        *,
        model: str | Mapping[str, Any] | None = None,
        parameters: int | str | None = None,
        method: str | None = None,
        sequence_length: int | str | None = None,
        options: Mapping[str, Any] | None = None,
        tokens: int | str | None = None,
        rows: int | str | None = None,
        effective_batch_size: int | str | None = None,
        hardware: Mapping[str, Any] | str | None = None,
        cloud: str | None = None,
        region: str | None = None,
        node_type: str | Sequence[str] | None = None,
        min_compute_capability: float | str | None = None,
        max_nodes: int | str | None = None,
        spot: bool | str = False,
        tier: str | None = None,
        catalog: str | Sequence[Mapping[str, Any]] | None = None,
        workspace_node_types: str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        objective: str | None = None,
        max_usd_per_hour: float | str | None = None,
        budget_usd: float | str | None = None,
        deadline_hours: float | str | None = None,
        log_volume: str | None = None,
        tags: Mapping[str, str] | Sequence[str] | str | None = None,
        policy_id: str | None = None,
        instance_pool_id: str | None = None,
        driver_instance_pool_id: str | None = None,
        single_user_name: str | None = None,
        script_folder: str | None = None,
        model_cache_volume: str | None = None,
        spark_version: str | None = None,
        top: int | str | None = None,
        download: bool = False,
        databricks_conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.model = model
        self.parameters = parameters
        self.method = method
        self.sequence_length = sequence_length
        self.options = options
        self.tokens = tokens
        self.rows = rows
        self.effective_batch_size = effective_batch_size
        self.hardware = hardware
        self.cloud = cloud
        self.region = region
        self.node_type = node_type
        self.min_compute_capability = min_compute_capability
        self.max_nodes = max_nodes
        self.spot = spot
        self.tier = tier
        self.catalog = catalog
        self.workspace_node_types = workspace_node_types
        self.objective = objective
        self.max_usd_per_hour = max_usd_per_hour
        self.budget_usd = budget_usd
        self.deadline_hours = deadline_hours
        self.log_volume = log_volume
        self.tags = tags
        self.policy_id = policy_id
        self.instance_pool_id = instance_pool_id
        self.driver_instance_pool_id = driver_instance_pool_id
        self.single_user_name = single_user_name
        self.script_folder = script_folder
        self.model_cache_volume = model_cache_volume
        self.spark_version = spark_version
        self.top = top
        self.download = download
        self.databricks_conn_id = databricks_conn_id

    def execute(self, context: Context) -> dict[str, Any]:
        conn_id = None if is_blank(self.databricks_conn_id) else self.databricks_conn_id
        try:
            request = self._request()
            return plan_in_task(request, context, self.log, databricks_conn_id=conn_id, download=self.download)
        except SpecError as error:
            raise AirflowFailException(str(error)) from error

    def _request(self) -> dict[str, Any]:
        """The options by their names; None is not given."""
        others = ("options", "databricks_conn_id")
        fields = {name: getattr(self, name) for name in self.template_fields if name not in others}
        options = self.options or {}
        if not isinstance(options, Mapping):
            text = "should be a mapping of options"
            raise SpecError(
                [FieldProblem(field="options", value=options, problem=text, suggestion="Use {'lora_rank': 8}.")]
            )
        return {**options, **{name: value for name, value in fields.items() if not is_blank(value)}}


def plan_in_task(
    request: Mapping[str, Any],
    context: Context,
    log: Any,
    *,
    databricks_conn_id: str | None = None,
    download: bool = False,
) -> dict[str, Any]:
    """The plan as JSON; shown as Markdown in the log and under the key ``markdown``.

    ``request``: options by their names, with ``hardware`` where that is there; what is blank is not given. Raises
    SpecError for what cannot be used, AirflowFailException where nothing fits or the workspace refuses,
    AirflowException where it does not answer.
    """
    from deepspeed_provider.requested.model_source import ModelSource, hub_fetch

    given = read_options(request)
    source = ModelSource(fetch=hub_fetch() if download else None)
    hardware = given.pop("hardware", None)
    if hardware is None:
        shown = _chosen_in_task(given, source, context["ti"], databricks_conn_id)
    else:
        asked = given if databricks_conn_id is None else {**given, "databricks_conn_id": databricks_conn_id}
        shown = _on_given_in_task(asked, read_hardware(hardware), source)
    log.info("%s", shown.markdown)
    # A plan that found nothing is shown too: it says why.
    context["ti"].xcom_push(key=MARKDOWN_KEY, value=shown.markdown)
    if shown.miss:
        raise AirflowFailException("\n".join(shown.miss))
    # Plain JSON, as another process would read it from the command line.
    content: dict[str, Any] = json.loads(json.dumps(shown.content, allow_nan=False))
    return content


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """A plan for people and for programs; ``miss``: why there is none."""

    markdown: str
    content: Mapping[str, Any]
    miss: Sequence[str]


def _chosen_in_task(
    given: Mapping[str, Any], source: ModelSource, instance: Any, databricks_conn_id: str | None
) -> _Shown:
    from deepspeed_provider.clusters.cluster_body import RunIdentity
    from deepspeed_provider.plan_markdown import plan_markdown
    from deepspeed_provider.plan_texts import miss_lines
    from deepspeed_provider.requested.plan import planned, planned_as_json

    run = RunIdentity(dag_id=instance.dag_id, run_id=instance.run_id, task_id=instance.task_id)
    offers = None if databricks_conn_id is None else offers_in_task(databricks_conn_id)
    found = planned(given, source, run, offers)
    nothing = found.plan.choice.best is None
    miss = [f"Nothing fits {found.model}.", *miss_lines(found.plan)] if nothing else []
    return _Shown(markdown=plan_markdown(found), content=planned_as_json(found), miss=miss)


def _on_given_in_task(given: Mapping[str, Any], hardware: Mapping[str, Any], source: ModelSource) -> _Shown:
    from deepspeed_provider.clusters.needs import Shortage
    from deepspeed_provider.plan_markdown import given_markdown
    from deepspeed_provider.plan_texts import given_text
    from deepspeed_provider.requested.given import planned_on_given_as_json, planned_on_hardware

    found = planned_on_hardware(given, hardware, source)
    short = found.plan.fitted if isinstance(found.plan.fitted, Shortage) else None
    miss = [f"{found.model} does not fit {given_text(found.plan.hardware)}. Nearest: {short}."] if short else []
    return _Shown(markdown=given_markdown(found), content=planned_on_given_as_json(found), miss=miss)


def offers_in_task(databricks_conn_id: str) -> WorkspaceOffers:
    """What the workspace has. Raises AirflowFailException where it refuses, AirflowException where it is silent."""
    from deepspeed_provider.backends.base import BackendUnavailable
    from deepspeed_provider.backends.workspace_wire import WireRefused
    from deepspeed_provider.hooks.workspace_offers import ask_offers

    where = f"The workspace of the connection {databricks_conn_id!r}"
    try:
        return ask_offers(databricks_conn_id)
    except WireRefused as error:
        raise AirflowFailException(f"{where} does not tell what it has: {error}") from error
    except BackendUnavailable as error:
        raise AirflowException(f"{where} cannot be asked what it has: {error}") from error


def read_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's options without what is blank; node types also with commas between them."""
    given = {name: value for name, value in values.items() if not is_blank(value)}
    if isinstance(given.get("node_type"), str):
        given["node_type"] = [name.strip() for name in given["node_type"].split(",") if name.strip()]
    return given


def read_hardware(value: Any) -> dict[str, Any]:
    """The argument ``hardware``, also as JSON, without what is blank. Raises :class:`SpecError`."""
    described = read_object(value, "hardware", "Give {'gpu': 'A100-80GB', 'gpus_per_node': 8}.")
    return {name: value for name, value in described.items() if not is_blank(value)}


def is_blank(value: Any) -> bool:
    """Whether nothing is given: templates render an empty Param as text."""
    return value is None or (isinstance(value, str) and value.strip().lower() in NOT_GIVEN)
