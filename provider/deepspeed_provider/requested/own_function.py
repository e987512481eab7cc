# SPDX-License-Identifier: Apache-2.0
"""A function that travels by value."""

from __future__ import annotations

import base64
import inspect
import sys
from pathlib import Path
from typing import Any

from deepspeed_provider.errors import FieldProblem
from deepspeed_provider.requested.own_training import is_named


def function_place(function: Any, problems: list[FieldProblem]) -> dict[str, str]:
    """``{"name": "module:function"}``, or ``{"pickled": …, "python": minor version}`` of a function by value."""
    if is_named(function):
        return {"name": function}
    if not inspect.isfunction(function):
        works = "Give a function, or 'module:function' with the module in code."
        problems.append(FieldProblem(field="function", value=function, problem="is no function", suggestion=works))
        return {}
    try:
        pickled = _by_value(function)
    except Exception as error:  # noqa: BLE001  (whatever an object that it refers to does when pickled)
        problem = f"cannot be pickled with what it refers to: {type(error).__name__}: {error}"
        works = "Make what it needs inside of it, or hand it over in arguments."
        name = function.__qualname__
        problems.append(FieldProblem(field="function", value=name, problem=problem, suggestion=works))
        return {}
    return {"pickled": base64.b64encode(pickled).decode(), "python": f"{sys.version_info[0]}.{sys.version_info[1]}"}


def pickler_code() -> tuple[str, ...]:
    """The package that reads the pickle: other versions of it may not, so it travels along."""
    import cloudpickle

    return (str(Path(cloudpickle.__file__).parent),)


def _by_value(function: Any) -> bytes:
    import cloudpickle

    module = sys.modules.get(function.__module__)
    if module is None:
        return bytes(cloudpickle.dumps(function))
    # A DAG's file is a module too, but one that no cluster can import.
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
