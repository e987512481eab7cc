# SPDX-License-Identifier: Apache-2.0
"""What the workspace of a connection has for a cluster, asked of it now."""

from __future__ import annotations

from typing import Final

from deepspeed_provider.clusters.workspace import WorkspaceOffers
from deepspeed_provider.hooks.databricks import DatabricksWorkspaceHook

NODE_TYPES: Final = "2.1/clusters/list-node-types"
SPARK_VERSIONS: Final = "2.1/clusters/spark-versions"


def ask_offers(databricks_conn_id: str) -> WorkspaceOffers:
    """Raises WireRefused where the workspace says no, and BackendUnavailable where it says nothing."""
    hook = DatabricksWorkspaceHook(databricks_conn_id)
    versions = hook.get(SPARK_VERSIONS).get("versions") or ()
    return WorkspaceOffers(
        # As it came: Azure's fields of quota are in no client's model.
        node_types=hook.get(NODE_TYPES),
        spark_versions=frozenset(str(version["key"]) for version in versions if "key" in version),
    )
