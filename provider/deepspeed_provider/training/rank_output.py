# SPDX-License-Identifier: Apache-2.0
"""What the distributor tells of ranks that failed, and the cause in it."""

from __future__ import annotations

import re

# The distributor quotes the last lines of torchrun after this.
_QUOTED = "included below: "
_LONGEST = 6000


def retold(error: BaseException, rank: str | None = None) -> RuntimeError:
    """The distributor's error with its cause in the first line.

    The message of an error is cut short on its way, and a person reads its beginning.
    """
    output = str(error).partition(_QUOTED)[2] or str(error)
    named = "a rank" if rank is None else f"rank {rank}"
    return RuntimeError(f"{named} failed: {cause_in(output)}\n{output[-_LONGEST:]}")


def cause_in(output: str) -> str:
    """The last exception of the program's own in torchrun's output.

    Its lines may begin with torchrun's "[rank0]: ". After it come torchrun's own traceback and report; a killed rank
    leaves only the report.
    """
    ends = re.findall(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w+(?:Error|Exception|Interrupt|Exit)\b.*)$", output, re.M)
    own = [line for line in ends if "ChildFailedError" not in line]
    if own:
        return str(own[-1])
    return " ".join(re.findall(r"^\s*(?:exitcode|traceback)\s*:.*$", output, re.M)) or output[-500:]
