# SPDX-License-Identifier: Apache-2.0
"""GPUs, node types and their prices as dated data, and how fast a training goes on them."""
