# SPDX-License-Identifier: Apache-2.0
"""What other DAGs can be scheduled on."""

from __future__ import annotations

from airflow.sdk import Asset


def model_asset(name: str) -> Asset:
    """A fine-tuned, evaluated and registered model.

    Each event's ``extra`` holds the registered name, version and alias, both perplexities and their
    ratio, and the MLflow run.
    """
    return Asset(name=name, uri=f"models://deepspeed-provider/{name}", group="model")
