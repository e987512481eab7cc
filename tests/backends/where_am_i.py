"""Tells what a rank process can see of the submitting side."""

import importlib.util
import sys


def main(payload):
    import deepspeed_provider.training.launcher as launcher

    return {
        "airflow": importlib.util.find_spec("airflow") is not None,
        "operators": importlib.util.find_spec("deepspeed_provider.operators") is not None,
        "launcher": launcher.__file__,
        "checkout": [path for path in sys.path if path.startswith(payload["checkout"])],
    }
