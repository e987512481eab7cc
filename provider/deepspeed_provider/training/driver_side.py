# SPDX-License-Identifier: Apache-2.0
"""What the driver of a Databricks cluster runs: it reads one request, starts the ranks and hands on what came out.

``launch_script`` is the file that the task names. It finds the code archive, which lies beside it, and calls ``main``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from . import failures, own_code, rank_output, storage
from .entry import call

RESULT_MARK = "deepspeed-provider result: "
FAILURE_MARK = "deepspeed-provider failure: "
RETURNED = "returned.json"


def launch_script(archive: str) -> str:
    """Source of the task's file. ``archive``: name of the zip beside it."""
    return (
        "# Starts a DeepSpeed training: python launch.py REQUEST\n"
        "import os, sys\n"
        # Not __file__, which is there only where the file is run as a script, and not where its text is.
        "here = os.path.dirname(os.path.abspath(sys._getframe().f_code.co_filename))\n"
        f"code = os.path.join(here, {archive!r})\n"
        "sys.path.insert(0, code)\n"
        "from deepspeed_provider.training.driver_side import main\n"
        "main(sys.argv[1], code)\n"
    )


def main(request_uri: str, code: str) -> None:
    """Runs the request and prints one marked line with what rank 0 returned, or lines with why there is nothing."""
    request = storage.read_json(request_uri)
    os.environ.update(request.get("environment") or {})
    try:
        own_code.require_python(request.get("python") or "")
        require_hardware(request)
        returned = start(request, code)
    except BaseException as error:
        tell_failure(request, error)
        raise
    kept = {"token": request["token"], "value": returned}
    print(RESULT_MARK + json.dumps(kept), flush=True)  # noqa: T201  (read from the task's output)
    uri = storage.join(request["output_uri"], RETURNED)
    try:
        storage.write_json(uri, kept)
    except Exception as error:  # noqa: BLE001  (the line holds it too)
        print(f"{uri} cannot be written: {error}", flush=True)  # noqa: T201


def require_hardware(request: Mapping[str, Any]) -> None:
    """Raises InputError when this machine has other GPUs than planned: the distributor would lower their number
    without a word, and the batch sizes hold for the planned ones only."""
    if not request["use_gpu"] or request["nodes"] > 1:
        return
    import torch

    found, wanted = torch.cuda.device_count(), request["gpus_per_node"]
    if found != wanted:
        raise failures.InputError(f"gpus_per_node = {wanted} in the plan, but the driver has {found}. Plan again.")


def start(request: Mapping[str, Any], code: str) -> Any:
    """Calls the entry here where the request says so; else starts the ranks, on the driver when it is the only node,
    and waits for what rank 0 returns."""
    from pyspark.sql import SparkSession

    # The distributor takes the active session; a script's is not active before it is asked for.
    SparkSession.builder.getOrCreate()
    if request.get("on_driver"):
        return json.loads(call(request["entry"], json.dumps(request["payload"])))
    from pyspark.ml.deepspeed.deepspeed_distributor import DeepspeedTorchDistributor

    alone = request["nodes"] == 1
    distributor = DeepspeedTorchDistributor(
        numGpus=request["gpus_per_node"],
        nnodes=request["nodes"],
        # On a single node there are no workers; of several nodes the driver's GPUs stay idle.
        localMode=alone,
        useGpu=request["use_gpu"],
        deepspeedConfig=dict(request.get("deepspeed_config") or {}),
    )
    rank = rank_function(request["entry"], code, dict(request.get("environment") or {}))
    # What rank 0 returned, as text: the distributor calls it anything or nothing.
    try:
        return json.loads(str(distributor.run(rank, json.dumps(request["payload"]))))
    except RuntimeError as error:
        raise rank_output.retold(error) from None


def rank_function(entry: str, code: str, environment: Mapping[str, str]) -> Callable[[str], str]:
    """What each rank runs. A closure, so that it is pickled by value: ranks find the archive by itself."""

    def run_rank(payload: str) -> str:
        import importlib
        import os
        import sys

        sys.path.insert(0, code)
        os.environ.update(environment)
        # Processes that a rank starts find the code by this.
        os.environ["PYTHONPATH"] = os.pathsep.join([code, *filter(None, [os.environ.get("PYTHONPATH")])])
        called: str = importlib.import_module("deepspeed_provider.training.entry").call(entry, payload)
        return called

    return run_rank


def tell_failure(request: Mapping[str, Any], error: BaseException) -> None:
    """Prints what the ranks wrote of their failures, or this one; never raises."""
    records = []
    for rank in range(request["nodes"] * request["gpus_per_node"]):
        try:
            records.append(storage.read_json(storage.join(request["output_uri"], f"failure-rank{rank}.json")))
        except Exception:  # noqa: BLE001  (a driver of storage may raise anything, or be missing)
            continue
    if not records and isinstance(error, failures.InputError):
        records = [{"kind": failures.USER, "type": type(error).__name__, "message": str(error), "rank": None}]
    for record in records:
        print(FAILURE_MARK + json.dumps(record), flush=True)  # noqa: T201  (read from the task's output)
