"""A training function that needs no torch: it says that it ran, waits as told, and returns."""

import os
import time
from pathlib import Path


def main(payload):
    rank = int(os.environ["RANK"])
    with Path(payload["marks"]).open("a") as marks:
        marks.write(f"{payload['name']} rank={rank} pid={os.getpid()}\n")
    deadline = time.monotonic() + payload.get("seconds", 0)
    while time.monotonic() < deadline:
        time.sleep(0.05)
    if payload.get("error"):
        raise ValueError(payload["error"])
    return {"name": payload["name"], "world_size": int(os.environ["WORLD_SIZE"])}
