# SPDX-License-Identifier: Apache-2.0
"""How much GPU, host and NVMe memory a fine-tune needs, as a sum of named parts. Pure: no torch, no Airflow, no I/O."""
