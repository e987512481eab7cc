# SPDX-License-Identifier: Apache-2.0
"""What the whole path costs over the same training started by hand.

The whole path is our DAG's fine-tune task in a real Airflow, scheduling included: submit
over Spark Connect, barrier stage, torchrun, training, deferral, trigger, resume, result. By hand is
``torch.distributed.run`` with the same plan on the same data set. Both take turns on one machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from deepspeed_provider.local.airflow_api import FINISHED, AirflowApi
from deepspeed_provider.local.engine import EmbeddedEngine, EngineSettings
from deepspeed_provider.local.processes import free_port
from deepspeed_provider.local.services import airflow_service
from deepspeed_provider.planning import Hardware, finetune_plan, plan
from deepspeed_provider.spec import FineTuneSpec
from deepspeed_provider.training.plan import TrainingPlan

ROUNDS = 2
RANKS = 2
DAGS = Path(__file__).parents[1] / "dags"
CONF = {"max_steps": 20, "ranks": RANKS, "registered_model_name": "", "evaluation_rows": 8, "generations": 0}

RUN_BY_HAND = """
import json, sys
from deepspeed_provider.training.launcher import main
main(json.load(open(sys.argv[1])))
"""


def measure() -> None:
    """Prints the ratio of medians, and both medians."""
    with tempfile.TemporaryDirectory() as folder:
        _measure_in(Path(folder))


def _measure_in(home: Path) -> None:
    engine = EmbeddedEngine(home, EngineSettings(ranks=RANKS))
    airflow = airflow_service(home, port=free_port(), dags_folder=DAGS, mlflow_url="")
    airflow = dataclasses.replace(airflow, environment={**airflow.environment, "MLFLOW_TRACKING_URI": ""})
    try:
        engine.ensure()
        airflow.start()
        airflow.wait()
        api = AirflowApi.of_home(airflow.url, airflow.folder)
        api.wait_for_dag("finetune", 120)
        # The first of each is thrown away: it converts the model, prepares the data, fills file caches.
        dataset_uri = _through_airflow(api)[1]
        by_hand_plan = _plan(home, dataset_uri)
        _by_hand(by_hand_plan, home)
        whole_path, by_hand = [], []
        for _ in range(ROUNDS):
            whole_path.append(_through_airflow(api)[0])
            by_hand.append(_by_hand(by_hand_plan, home))
    finally:
        airflow.stop()
        engine.stop()
    path, hand = statistics.median(whole_path), statistics.median(by_hand)
    print(
        f"the fine-tune task takes {path / hand:.2f} times as long as the same training by torchrun: "
        f"{path:.1f} s and {hand:.1f} s, {path - hand:.1f} s more whatever the length "
        f"(medians of {ROUNDS}, {CONF['max_steps']} steps on {RANKS} ranks)"
    )


def _through_airflow(api: AirflowApi) -> tuple[float, str]:
    """(seconds of the fine-tune task, data set) of one run of the DAG; later tasks are not waited for."""
    run_id = api.trigger("finetune", CONF)
    while True:
        path = f"/dags/finetune/dagRuns/{run_id}/taskInstances/finetune"
        task: dict[str, Any] = api.call("GET", path)
        if task["state"] == "success":
            break
        if task["state"] in ("failed", "upstream_failed"):
            raise RuntimeError(f"the run {run_id} failed; its logs are in the Airflow home")
        time.sleep(1)
    # Evaluation would compete with the next measurement.
    while api.run_state("finetune", run_id) not in FINISHED:
        time.sleep(1)
    # From the end of the task before it, so that Airflow's scheduling counts too; a resumed task's own
    # start date may be that of its resumption.
    prepared = api.call("GET", f"/dags/finetune/dagRuns/{run_id}/taskInstances/prepare")
    waited = datetime.fromisoformat(task["end_date"]) - datetime.fromisoformat(prepared["end_date"])
    dataset = api.xcom("finetune", run_id, "prepare")
    return waited.total_seconds(), (json.loads(dataset) if isinstance(dataset, str) else dataset)["dataset_uri"]


def _plan(home: Path, dataset_uri: str) -> TrainingPlan:
    from deepspeed_provider.params import finetune_params

    params = {name: param.resolve() for name, param in finetune_params().items()}
    spec = FineTuneSpec.from_params({**params, **CONF})
    chosen = plan(spec, Hardware(gpus_per_node=RANKS, use_gpu=False))
    return finetune_plan(
        chosen,
        token="by-hand",
        dataset_uri=dataset_uri,
        output_uri=(home / "by-hand").as_uri(),
        cache_uri=(home / "runs" / "cache").as_uri(),
    )


def _by_hand(training: TrainingPlan, home: Path) -> float:
    output = home / f"by-hand-{time.monotonic_ns()}"
    wire = dataclasses.replace(training, output_uri=output.as_uri()).to_json()
    (home / "by_hand.json").write_text(json.dumps(wire))
    (home / "by_hand.py").write_text(RUN_BY_HAND)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    threads = str(max(1, (os.cpu_count() or 1) // RANKS))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    started = time.perf_counter()
    subprocess.run(
        [*words, str(home / "by_hand.py"), str(home / "by_hand.json")], env=environment, check=True, capture_output=True
    )
    return time.perf_counter() - started
