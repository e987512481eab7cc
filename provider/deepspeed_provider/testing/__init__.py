# SPDX-License-Identifier: Apache-2.0
"""What users import to test their own DAGs: a fake Databricks workspace, and a cluster in memory.

The pytest plugin in :mod:`deepspeed_provider.testing.pytest_plugin` gives both as fixtures.
"""
