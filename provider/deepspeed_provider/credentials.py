# SPDX-License-Identifier: Apache-2.0
"""What looks like a credential, and the references that Databricks fills in on a cluster. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

from deepspeed_provider.errors import FieldProblem

# What a cluster's spark_env_vars and spark_conf may hold in place of a secret.
REFERENCE: Final = re.compile(r"\{\{secrets/[^/{}]+/[^/{}]+\}\}")
HIDDEN: Final = "(hidden)"

_NAMES: Final = re.compile(
    r"(?:^|[_.-])(?:token|password|passwd|secret|credentials?|(?:api|access|account|private)[_.-]?key)$",
    re.IGNORECASE,
)
_VALUES: Final = re.compile(
    r"\bdapi[0-9a-f]{32}"  # Databricks
    r"|\bhf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b"  # AWS
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\."  # a JSON web token
    r"|://[^/\s:@]*:[^/\s:@]+@"  # a password in an address
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
)


def looks_secret(name: str, value: Any) -> bool:
    """Whether the value under this name must not be sent; a guess by usual names and shapes, numbers aside."""
    text = str(value)
    if not text or REFERENCE.fullmatch(text) or isinstance(value, bool | int | float):
        return False
    return bool(_NAMES.search(name) or _VALUES.search(text))


def secret_problem(field: str, variable: str) -> FieldProblem:
    """``variable``: the environment variable in which a cluster would give it to the ranks."""
    return FieldProblem(
        field=field,
        value=HIDDEN,
        problem="looks like a credential, which would be stored with the run",
        suggestion="Keep it in a secret scope, and let the cluster fill it in: job={'cluster_fields': "
        f"{{'spark_env_vars': {{{variable!r}: '{{{{secrets/SCOPE/KEY}}}}'}}}}}}.",
    )
