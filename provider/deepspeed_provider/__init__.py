# SPDX-License-Identifier: Apache-2.0
"""Apache Airflow provider that sizes, runs and survives DeepSpeed fine-tunes."""

__version__ = "0.1.0"
