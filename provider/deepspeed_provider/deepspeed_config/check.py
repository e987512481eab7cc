# SPDX-License-Identifier: Apache-2.0
"""Refuses a DeepSpeed configuration that makes no sense before it costs money.

Most of it would be accepted by DeepSpeed, which ignores what it does not know, or fails on the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deepspeed_provider.deepspeed_config.findings import Facts, Finding, Severity
from deepspeed_provider.deepspeed_config.rules import RULES
from deepspeed_provider.deepspeed_config.subject import Subject

# Values that no finding may repeat.
SECRETS: Final = ("comet.api_key",)


def check(config: Mapping[str, Any], facts: Facts | None = None) -> list[Finding]:
    """Everything that is wrong with a configuration, errors first; empty for a good one.

    Never raises for what stands in ``config``, whatever it is. What is None in ``facts`` is not judged.
    """
    subject = Subject(config, facts or Facts())
    findings = [
        Finding(
            rule=rule.name,
            severity=rule.severity,
            path=found.path,
            value="(hidden)" if found.path in SECRETS else found.value,
            problem=found.problem,
            suggestion=found.suggestion,
        )
        for rule in RULES
        for found in rule.find(subject)
    ]
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)


def findings_as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """For a wire."""
    return [
        {
            "rule": finding.rule,
            "severity": finding.severity.value,
            "path": finding.path,
            "value": finding.value,
            "problem": finding.problem,
            "suggestion": finding.suggestion,
        }
        for finding in findings
    ]
