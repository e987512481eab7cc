# SPDX-License-Identifier: Apache-2.0
"""Training code of the user's own as durable runs on the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepspeed_provider.backends.base import RunRequest
from deepspeed_provider.errors import FieldProblem, SpecError, tried
from deepspeed_provider.operators.durable import DurableRunOperator
from deepspeed_provider.requested import git_source, own_function, own_training

if TYPE_CHECKING:
    from deepspeed_provider.runs.record import RunRecord

MODULE = "deepspeed_provider.training.own_code"


class OwnTrainingOperator(DurableRunOperator):
    """What a script and a function share: code that travels, and the ranks that run it.

    Returns what rank 0 hands back, as JSON.

    :param code: modules and package folders of this machine that the ranks can import.
    :param nodes: machines. ``gpus_per_node``: ranks on each.
    :param use_gpu: False trains on CPU.
    :param environment: of the ranks; stored with the run, so nothing that looks like a credential is taken.
    """

    template_fields: Sequence[str] = (*DurableRunOperator.template_fields, "arguments", "environment", "code")

    arguments: Any

    def __init__(
        self,
        *,
        code: Sequence[str] = (),
        nodes: int = 1,
        gpus_per_node: int = 1,
        use_gpu: bool = True,
        environment: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.code = code
        self.nodes = nodes
        self.gpus_per_node = gpus_per_node
        self.use_gpu = use_gpu
        self.environment = environment

    def make_own(self, ranks: int | None, problems: list[FieldProblem]) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        """(entry, payload, code) of what is run; adds to ``problems``."""
        raise NotImplementedError

    def build_request(self, token: str, output_uri: str, mlflow_run_id: str | None) -> RunRequest:
        problems: list[FieldProblem] = []
        own_training.require_counts(problems, nodes=self.nodes, gpus_per_node=self.gpus_per_node)
        if self.databricks_conn_id:
            own_training.require_cluster(self.job, problems)
            tried(self.get_job_settings, problems)
        # Ranks cannot be counted where one of both is no number.
        ranks = None if problems else self.nodes * self.gpus_per_node
        places = own_training.places_of(self.code, problems)
        environment = own_training.variables(self.environment or {}, problems)
        entry, payload, code = self.make_own(ranks, problems)
        if problems:
            raise SpecError(problems)
        uri = self.get_tracking_uri()
        tracking = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_RUN_ID": mlflow_run_id} if uri and mlflow_run_id else {}
        shared = {
            "token": token,
            "output_uri": output_uri,
            "world_size": ranks,
            "use_gpu": self.use_gpu,
            "tracking": tracking,
        }
        return RunRequest(
            entry=f"{MODULE}:{entry}",
            payload={**shared, **payload},
            code=(*places, *code),
            output_uri=output_uri,
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            use_gpu=self.use_gpu,
            deepspeed_config=payload.get("deepspeed_config"),
            environment=environment,
            python=(payload.get("function") or {}).get("python", ""),
        )

    def build_output(self, record: RunRecord, result: Any) -> Any:  # noqa: ARG002
        return result["returned"]


class DeepSpeedScriptOperator(OwnTrainingOperator):
    """Runs a training script of your own in every rank, by ``DeepspeedTorchDistributor``.

    Returns the JSON value that rank 0's script leaves in the file which ``DEEPSPEED_PROVIDER_RESULT`` names, else
    ``{"exit_status": 0}``. A script that raises, or ends with another status, fails the task.

    :param script: a ``.py`` file of the worker, which travels with the run; or one that the cluster finds below
        ``/Workspace`` (a Git folder too), ``/Volumes`` or ``dbfs:/``, whose content is not part of the run's identity.
        With ``git_source``, its path in that repository.
    :param git_source: ``git_url`` and one of ``git_branch``, ``git_tag`` and ``git_commit``, as the Jobs API has them.
        Every rank gets the same commit, and starts at the repository's root. Private ones take ``GIT_TOKEN`` of the
        cluster's variables.
    :param arguments: numbers and texts; the script sees texts.
    :param deepspeed_config: DeepSpeed's configuration, a mapping or JSON. It is checked, and lies in the file that
        ``DEEPSPEED_PROVIDER_CONFIG`` names.
    :param config_flags: how the script is told of it: ``deepspeed``, by ``--deepspeed --deepspeed_config FILE``;
        ``hf``, by ``--deepspeed FILE``, as Hugging Face's trainer has it; ``none``, not by arguments. Without a
        configuration no flag is added.
    """

    template_fields: Sequence[str] = (*OwnTrainingOperator.template_fields, "script", "git_source", "deepspeed_config")

    def __init__(
        self,
        *,
        script: Any,
        git_source: Mapping[str, str] | None = None,
        arguments: Sequence[Any] = (),
        deepspeed_config: Mapping[str, Any] | str | None = None,
        config_flags: str = "deepspeed",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.script = script
        self.git_source = git_source
        self.arguments = arguments
        self.deepspeed_config = deepspeed_config
        self.config_flags = config_flags

    def make_own(self, ranks: int | None, problems: list[FieldProblem]) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        own_training.refuse_git(self.job, problems)
        place: Mapping[str, Any]
        if self.git_source is None:
            place = own_training.script_place(self.script, problems)
        else:
            place = git_source.script_in(self.git_source, self.script, problems)
        payload = {
            "script": place,
            "arguments": own_training.words(self.arguments, problems),
            "deepspeed_config": own_training.own_config(self.deepspeed_config, self.config_flags, ranks, problems),
            "config_flags": self.config_flags,
        }
        return "run_script", payload, (str(self.script),) if "shipped" in place else ()


class DeepSpeedFunctionOperator(OwnTrainingOperator):
    """Calls a function of your own in every rank, by ``DeepspeedTorchDistributor``, and returns what rank 0's returns.

    :param function: pickled by value with what it refers to in its own module, so without secrets; the cluster's Python
        must then have the worker's minor version, which is compared before anything is submitted. Other modules that
        it imports have to be on the cluster, or in ``code``. Or ``"module:function"``, with the module in ``code``.
    :param arguments: its keyword arguments; JSON values.
    """

    def __init__(
        self,
        *,
        function: Callable[..., Any] | str,
        arguments: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.function = function
        self.arguments = arguments

    def make_own(
        self,
        ranks: int | None,  # noqa: ARG002
        problems: list[FieldProblem],
    ) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        function = own_function.function_place(self.function, problems)
        payload = {"function": function, "arguments": own_training.keywords(self.arguments or {}, problems)}
        return "call_function", payload, own_function.pickler_code() if "pickled" in function else ()
