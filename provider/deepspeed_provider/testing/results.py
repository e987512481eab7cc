# SPDX-License-Identifier: Apache-2.0
"""What a run returns where nothing trains and nothing is prepared: enough for the tasks that come after it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from deepspeed_provider.training.evaluate import compare

ROWS: Final = 100


def usual_result(request: Mapping[str, Any]) -> dict[str, Any]:
    """Of the job that the request's payload names.

    Args:
        request: ``token``, ``payload``, ``output_uri``, ``nodes`` and ``gpus_per_node`` of a run request.
    """
    if {"script", "function"} & set(request["payload"]):
        # Of a user's own, as of a script that leaves no result (training/own_code.py).
        return {"token": request["token"], "returned": {"exit_status": 0}}
    if "settings" in request["payload"]:
        return usual_manifest(request["payload"]["settings"])
    job = request["payload"].get("job")
    return {
        "job": job,
        "token": request["token"],
        "world_size": request["nodes"] * request["gpus_per_node"],
        **(_evaluated(request["payload"]) if job == "evaluate" else _tuned(request["output_uri"])),
    }


def usual_manifest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a data set of a hundred rows. ``settings``: the fields of ``PrepareSettings``."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    heldout = round(ROWS * settings["heldout_fraction"]) or 1
    return {
        "complete": True,
        "source": settings["source"],
        "settings": dict(settings),
        "fingerprint": digest,
        "rows": {"kept": ROWS},
        "splits": {"train": {"rows": ROWS - heldout}, "heldout": {"rows": heldout}},
        "skipped": {},
        "dataset_uri": f"{settings['output_uri']}/{digest}",
    }


def _tuned(output_uri: str) -> dict[str, Any]:
    metrics = {"first_train_loss": 3.0, "train_loss": 2.0, "eval_loss": 2.0, "eval_perplexity": 7.389, "steps": 1}
    return {"metrics": metrics, "model_uri": f"{output_uri}/model", "mlflow_model_uri": None}


def _evaluated(payload: Mapping[str, Any]) -> dict[str, Any]:
    asked = payload.get("evaluation") or {}
    rows = asked.get("rows") or ROWS // 10
    return {"metrics": compare(3.0, 2.0), "samples": [], "rows": rows, "tuned_uri": asked.get("tuned_uri")}
