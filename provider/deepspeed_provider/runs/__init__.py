# SPDX-License-Identifier: Apache-2.0
"""Durable runs: one state machine for deferrable and blocking tasks. Nothing here imports Airflow."""
