# SPDX-License-Identifier: Apache-2.0
"""Airflow finds the provider, and shows its connection without importing its hook."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import airflow
import jsonschema
from deepspeed_provider.provider_info import PACKAGE_NAME, get_provider_info

DAGS = Path(__file__).parent.parent / "dags"
DOCUMENT = DAGS.parent / "docs" / "databricks.md"
OPERATORS = re.compile(r"^from (deepspeed_provider\.operators\.\w+) import", re.MULTILINE)

PROBE = """
import json, sys
from airflow.providers_manager import ProvidersManager
manager = ProvidersManager()
manager.initialize_providers_hooks()
hook = manager.hooks["spark_connect"]
print("FOUND" + json.dumps({
    "provider": manager.providers["airflow-provider-deepspeed"].data["name"],
    "hook": [hook.hook_class_name, hook.hook_name, hook.connection_type, hook.connection_testable],
    "fields": {
        widget.field_name: widget.is_sensitive
        for name, widget in manager.connection_form_widgets.items() if "spark_connect" in name
    },
    "behaviour": manager.field_behaviours["spark_connect"],
    "links": sorted(name for name in manager.extra_links_class_names if name.startswith("deepspeed_provider")),
}))
"""


def test_it_fits_the_schema() -> None:
    schema = json.loads((Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(get_provider_info(), schema)
    assert get_provider_info()["package-name"] == PACKAGE_NAME


def test_airflow_finds_and_shows_it(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-W", "error::airflow.exceptions.AirflowProviderDeprecationWarning", "-c", PROBE],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "AIRFLOW_HOME": str(tmp_path)},
        check=False,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout.rpartition("FOUND")[2])
    assert found["provider"] == "DeepSpeed"
    path = "deepspeed_provider.hooks.spark_connect.SparkConnectHook"
    assert found["hook"] == [path, "Spark Connect", "spark_connect", True]
    assert set(found["fields"]) == {"user_id", "use_ssl", "ui_url", "base_uri"}
    assert found["behaviour"]["relabeling"] == {"password": "Token"}
    names = ("ClusterLogsLink", "DatabricksRunLink", "MlflowRunLink", "SparkUiLink")
    assert found["links"] == [f"deepspeed_provider.links.{name}" for name in names]


def test_every_named_class_exists() -> None:
    info = get_provider_info()
    for path in [*info["extra-links"], info["connection-types"][0]["hook-class-name"]]:
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name)


def test_every_operator_is_in_a_named_module() -> None:
    """A user of the provider's page looks for those of the shipped DAGs and of the documents there."""
    (operators,) = get_provider_info()["operators"]
    used = [name for path in (*sorted(DAGS.glob("*.py")), DOCUMENT) for name in OPERATORS.findall(path.read_text())]
    assert set(used) == set(operators["python-modules"])
    for name in operators["python-modules"]:
        import_module(name)
