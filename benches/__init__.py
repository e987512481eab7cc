# SPDX-License-Identifier: Apache-2.0
"""Measurements behind every performance claim: ratios, taken side by side in one run."""
