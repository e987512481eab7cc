"""A process that submits a run and sees it through, for being killed at any instruction.

Prints one line per phase, so that the killer can aim. Everything that it needs after a kill is in
the deterministic handle; it keeps no state of its own.

``submitter.py JOB`` is one such process. ``submitter.py serve`` forks one for each line of its input,
since importing Spark takes longer than submitting; it answers with their process ids.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def say(phase):
    print(phase, flush=True)


def see_through(job):
    say("started")
    from deepspeed_provider.backends.base import RunIdentity, RunRequest

    from backends.cases import CONNECT

    request = RunRequest(**{**job["request"], "code": tuple(job["request"]["code"])})
    backend = CONNECT[job["backend"]](job["address"])
    handle = backend.mint(request, RunIdentity(key=job["key"], generation=job["generation"], digest=request.digest))
    say("submitting")
    handle = backend.submit(request, handle)
    say("submitted")
    while not backend.poll(handle).state.terminal:
        say("polling")
        time.sleep(0.2)
    print("result " + json.dumps(backend.result(handle)), flush=True)


def serve():
    # Before the forks, since it takes long.
    for name in ("pyspark.ml.deepspeed.deepspeed_distributor", "deepspeed_provider.hooks.databricks", "backends.cases"):
        importlib.import_module(name)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not waited for
    say("serving")
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(job["output"], os.O_WRONLY), 1)
            try:
                see_through(job)
            except Exception:  # noqa: BLE001 - whatever it is, the test wants to read it
                traceback.print_exc()
            os._exit(0)
        say(child)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else see_through(json.loads(sys.argv[1]))
