# SPDX-License-Identifier: Apache-2.0
"""What Airflow reads about this provider without importing anything else of it."""

from __future__ import annotations

from typing import Any

from deepspeed_provider import __version__

PACKAGE_NAME = "airflow-provider-deepspeed"


def get_provider_info() -> dict[str, Any]:
    """Provider metadata, in the shape of Airflow's ``provider_info.schema.json``."""
    return {
        "package-name": PACKAGE_NAME,
        "name": "DeepSpeed",
        "description": "Plans and runs durable DeepSpeed fine-tunes of language models over Spark Connect and "
        "through the Databricks Jobs API.",
        "versions": [__version__],
        "integrations": [{"integration-name": "DeepSpeed", "external-doc-url": "https://www.deepspeed.ai"}],
        "operators": [{"integration-name": "DeepSpeed", "python-modules": list(_OPERATORS)}],
        "connection-types": [_SPARK_CONNECT],
        "extra-links": [
            "deepspeed_provider.links.MlflowRunLink",
            "deepspeed_provider.links.SparkUiLink",
            "deepspeed_provider.links.DatabricksRunLink",
            "deepspeed_provider.links.ClusterLogsLink",
        ],
    }


_OPERATORS = tuple(
    f"deepspeed_provider.operators.{name}"
    for name in ("dataset", "finetune", "own_training", "plan", "register", "validate")
)

_SPARK_CONNECT: dict[str, Any] = {
    "connection-type": "spark_connect",
    "hook-class-name": "deepspeed_provider.hooks.spark_connect.SparkConnectHook",
    "hook-name": "Spark Connect",
    "ui-field-behaviour": {
        "hidden-fields": ["schema", "login"],
        "relabeling": {"password": "Token"},
        "placeholders": {
            "host": "spark.example.com; empty or 'local' takes the embedded engine",
            "port": "15002",
            "password": "bearer token of the server, if it wants one (implies TLS)",
        },
    },
    "conn-fields": {
        "user_id": {
            "label": "User id",
            "description": "Runs belong to a user id: use the same one wherever a run is asked for. Default: airflow.",
            "schema": {"type": ["string", "null"], "maxLength": 200},
        },
        "use_ssl": {
            "label": "Use TLS",
            "description": "Encrypt the channel. A token is only ever sent encrypted.",
            "schema": {"type": ["boolean", "null"], "default": False},
        },
        "ui_url": {
            "label": "Spark UI address",
            "description": "Shown as a link on running tasks.",
            "schema": {"type": ["string", "null"]},
        },
        "base_uri": {
            "label": "Folder for runs",
            "description": "URI of a folder that the cluster can read and write, for example s3a://bucket/fine-tunes.",
            "schema": {"type": ["string", "null"]},
        },
    },
}
