"""A process that submits a run and sees it through, for being killed at any instruction.

Prints one line per phase, so that the killer can aim. Everything that it needs after a kill is in
the deterministic handle; it keeps no state of its own.
"""

import json
import sys
import time


def say(phase):
    print(phase, flush=True)


def main():
    say("started")
    from deepspeed_provider.backends.base import RunIdentity, RunRequest
    from deepspeed_provider.backends.spark_connect import SparkConnectBackend

    job = json.loads(sys.argv[1])
    request = RunRequest(**{**job["request"], "code": tuple(job["request"]["code"])})
    backend = SparkConnectBackend(job["url"])
    handle = backend.mint(request, RunIdentity(key=job["key"], generation=job["generation"], digest=request.digest))
    say("submitting")
    backend.submit(request, handle)
    say("submitted")
    while not backend.poll(handle).state.terminal:
        say("polling")
        time.sleep(0.2)
    print("result " + json.dumps(backend.result(handle)), flush=True)


main()
