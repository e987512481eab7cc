# SPDX-License-Identifier: Apache-2.0
"""Through the Jobs API over several nodes: ranks are tasks of Spark's, in one barrier stage, and not the driver's."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed_provider.backends.base import RunRequest, RunState
from deepspeed_provider.backends.databricks_jobs import DatabricksJobsBackend
from deepspeed_provider.backends.jobs_body import JobSettings
from deepspeed_provider.hooks.databricks import DatabricksWorkspaceHook

from backends.cases import CLUSTER
from backends.test_contract import wait_until_terminal

TRAINING = """
import os
import torch
import torch.distributed as dist

def main(payload):
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return {"total": total.item(), "ranks_of_a_node": os.environ["LOCAL_WORLD_SIZE"]}
"""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_ranks_of_all_nodes_work_together(databricks_jobs_case, tmp_path: Path, nodes: int) -> None:
    """On one machine: the driver's session has a slot for each node of one rank."""
    case, code = databricks_jobs_case, tmp_path / "summing.py"
    code.write_text(TRAINING)
    request = RunRequest(
        entry="summing:main",
        payload={"name": "sum"},
        code=(str(code),),
        output_uri=f"{case.uri}/sum",
        nodes=nodes,
        gpus_per_node=2 // nodes,
        use_gpu=False,
    )
    cluster = {**CLUSTER, "num_workers": nodes if nodes > 1 else 0}
    backend = DatabricksJobsBackend(DatabricksWorkspaceHook(), JobSettings(code_folder=case.address, cluster=cluster))
    handle = backend.submit(request, backend.mint(request, case.identity(request)))
    assert wait_until_terminal(backend, handle) is RunState.SUCCEEDED
    assert backend.result(handle) == {"total": 3.0, "ranks_of_a_node": str(2 // nodes)}
