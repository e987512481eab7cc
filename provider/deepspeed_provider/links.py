# SPDX-License-Identifier: Apache-2.0
"""Links on a running or finished task.

Airflow asks for a link each time a task leaves a worker, deferral included, and stores what it gets:
so the address is read from an XCom that the operator pushes before anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink, BaseXCom

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

MLFLOW_URL_KEY = "mlflow_run_url"
SPARK_UI_URL_KEY = "spark_ui_url"
DATABRICKS_RUN_URL_KEY = "databricks_run_url"
CLUSTER_LOGS_URL_KEY = "cluster_logs_url"


class MlflowRunLink(BaseOperatorLink):
    """The run's page in MLflow, where a tracking server with pages is used."""

    name = "MLflow run"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:  # noqa: ARG002
        return BaseXCom.get_value(ti_key=ti_key, key=MLFLOW_URL_KEY) or ""  # type: ignore[arg-type]


class SparkUiLink(BaseOperatorLink):
    """The Spark UI of the cluster, where its address is known."""

    name = "Spark UI"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:  # noqa: ARG002
        return BaseXCom.get_value(ti_key=ti_key, key=SPARK_UI_URL_KEY) or ""  # type: ignore[arg-type]


class DatabricksRunLink(BaseOperatorLink):
    """The run's page in the Databricks workspace, for a run through the Jobs API."""

    name = "Databricks run"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:  # noqa: ARG002
        return BaseXCom.get_value(ti_key=ti_key, key=DATABRICKS_RUN_URL_KEY) or ""  # type: ignore[arg-type]


class ClusterLogsLink(BaseOperatorLink):
    """The driver's logs on the run's cluster in the Databricks workspace."""

    name = "Cluster logs"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:  # noqa: ARG002
        return BaseXCom.get_value(ti_key=ti_key, key=CLUSTER_LOGS_URL_KEY) or ""  # type: ignore[arg-type]


# What a link is called, by the XCom that it reads.
LINK_NAMES = {
    MLFLOW_URL_KEY: MlflowRunLink.name,
    SPARK_UI_URL_KEY: SparkUiLink.name,
    DATABRICKS_RUN_URL_KEY: DatabricksRunLink.name,
    CLUSTER_LOGS_URL_KEY: ClusterLogsLink.name,
}
