# SPDX-License-Identifier: Apache-2.0
"""The fields that the API has where a user's own are merged, to tell a name that was mistyped.

Source: databricks-sdk 0.162, ``JobsAPI.submit``, ``SubmitTask`` and ``ClusterSpec``. A name that is none of them and
near none may be newer than this list, and travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from deepspeed_provider.errors import FieldProblem, nearest

# As near as a letter that is missing, doubled or swapped.
NEAR: Final = 0.85
OF_RUN: Final = frozenset(
    (
        "access_control_list",
        "budget_policy_id",
        "duration_target",
        "email_notifications",
        "environment_variables",
        "environments",
        "git_source",
        "health",
        "idempotency_token",
        "notification_settings",
        "performance_target",
        "queue",
        "run_as",
        "run_name",
        "tasks",
        "timeout_seconds",
        "usage_policy_id",
        "webhook_notifications",
    )
)
OF_TASK: Final = frozenset(
    (
        "ai_function_task",
        "ai_runtime_task",
        "alert_task",
        "clean_rooms_notebook_task",
        "compute",
        "condition_task",
        "dashboard_task",
        "dbt_cloud_task",
        "dbt_platform_task",
        "dbt_task",
        "depends_on",
        "description",
        "disable_auto_optimization",
        "disabled",
        "email_notifications",
        "environment_key",
        "environment_variables_key",
        "existing_cluster_id",
        "for_each_task",
        "gen_ai_compute_task",
        "health",
        "libraries",
        "max_retries",
        "min_retry_interval_millis",
        "new_cluster",
        "notebook_task",
        "notification_settings",
        "pipeline_task",
        "power_bi_task",
        "python_operator_task",
        "python_wheel_task",
        "retry_on_timeout",
        "run_if",
        "run_job_task",
        "spark_jar_task",
        "spark_python_task",
        "spark_submit_task",
        "sql_task",
        "task_key",
        "timeout_seconds",
        "webhook_notifications",
    )
)
OF_CLUSTER: Final = frozenset(
    (
        "apply_policy_default_values",
        "autoscale",
        "autotermination_minutes",
        "aws_attributes",
        "azure_attributes",
        "cluster_log_conf",
        "cluster_name",
        "custom_tags",
        "data_security_mode",
        "dependency_mode",
        "docker_image",
        "driver_instance_pool_id",
        "driver_node_type_flexibility",
        "driver_node_type_id",
        "enable_elastic_disk",
        "enable_local_disk_encryption",
        "gcp_attributes",
        "init_scripts",
        "instance_pool_id",
        "is_single_node",
        "kind",
        "node_type_id",
        "num_workers",
        "policy_id",
        "remote_disk_throughput",
        "runtime_engine",
        "single_user_name",
        "spark_conf",
        "spark_env_vars",
        "spark_version",
        "ssh_public_keys",
        "total_initial_remote_disk_size",
        "use_ml_runtime",
        "worker_node_type_flexibility",
        "workload_type",
    )
)
BY_SETTING: Final = {"run_fields": OF_RUN, "task_fields": OF_TASK, "cluster_fields": OF_CLUSTER, "cluster": OF_CLUSTER}


def mistyped(given: Mapping[str, Any]) -> Iterator[FieldProblem]:
    """``given``: settings of a job, by their names."""
    for setting, known in BY_SETTING.items():
        for name, value in (given.get(setting) or {}).items():
            if name not in known and (meant := nearest(name, known, NEAR)):
                yield FieldProblem(
                    field=f"job.{setting}.{name}",
                    value=value,
                    problem="is no field of the API",
                    suggestion=f"Did you mean {meant!r}?",
                )
