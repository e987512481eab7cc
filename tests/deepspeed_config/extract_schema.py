# SPDX-License-Identifier: Apache-2.0
"""What the installed DeepSpeed reads of a configuration, as data for the checker.

``python tests/deepspeed_config/extract_schema.py > provider/deepspeed_provider/deepspeed_config/data/schema.json``

Nothing here lists keys by hand. DeepSpeed's own configuration class reads a dictionary that records what it is
asked for; where it hands a section to one of its pydantic models, the model's fields are taken; the parameters of
optimizers and schedulers are those of their constructors; the fields of a ZeRO stage are those that the engine
reads on its way to that stage's optimizer.
"""

from __future__ import annotations

import ast
import enum
import importlib.metadata
import importlib.util
import inspect
import json
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

MARKER = "recorded by the schema extractor"

# The least that lets the class read on: without a type it never asks for an optimizer's params.
SEEDS: dict[str, dict[str, Any]] = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
# Parameters of optimizers and schedulers are those of their constructors, not what a seed makes DeepSpeed ask for.
CONSTRUCTOR_PARAMETERS = ("optimizer.params", "scheduler.params")
# Read where a process group runs and no mpu is given (runtime/config.py, compile/init_sp.py).
READ_ELSEWHERE = {"sequence_parallel_size": 1, "data_parallel_size": 1}
# Read by other parts of DeepSpeed as they are, key by key and late (runtime/data_pipeline, autotuning).
OPEN_SECTIONS = ("data_efficiency", "autotuning")


class Keys:
    """``dict.keys()`` that records what is looked for in it."""

    def __init__(self, owner: Recording) -> None:
        self._owner = owner

    def __contains__(self, key: str) -> bool:
        return key in self._owner

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self._owner)

    def __len__(self) -> int:
        return len(self._owner)


class Recording(dict[str, Any]):
    """A dictionary that remembers which keys it was asked for, with which defaults."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.defaults: dict[str, Any] = {}
        self.handed_on_whole = False

    def get(self, key: str, default: Any = None) -> Any:
        self.defaults[key] = default
        return dict.get(self, key, default)

    def __getitem__(self, key: str) -> Any:
        self.defaults.setdefault(key, None)
        return dict.__getitem__(self, key)

    def __contains__(self, key: object) -> bool:
        self.defaults.setdefault(str(key), None)
        return dict.__contains__(self, key)

    def keys(self) -> Any:
        return Keys(self)

    def __iter__(self) -> Iterator[str]:  # overridden, so that ** asks keys()
        return dict.__iter__(self)

    def items(self) -> Any:
        self.handed_on_whole = True
        return dict.items(self)

    def __copy__(self) -> Recording:
        self.handed_on_whole = True
        return self

    def __deepcopy__(self, memo: object) -> Recording:
        return self


def extract() -> dict[str, Any]:
    """The schema, as JSON holds it."""
    import deepspeed
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    del deepspeed
    sections: dict[str, Any] = {}
    _section_by_reading("", sections)
    top = sections[""]["fields"] | {name: _scalar(default) for name, default in READ_ELSEWHERE.items()}
    for name in _REMOVED_TOP_LEVEL_CONFIG_KEYS:
        top.pop(name, None)
    sections[""]["fields"] = dict(sorted(top.items()))
    _add_stages(sections["zero_optimization"]["fields"])
    return {
        "deepspeed": importlib.metadata.version("deepspeed"),
        "extracted_on": date.today().isoformat(),
        "removed": {
            **_REMOVED_TOP_LEVEL_CONFIG_KEYS,
            **{f"zero_optimization.{name}": text for name, text in _REMOVED_ZERO_CONFIG_KEYS.items()},
        },
        "sections": dict(sorted(sections.items())),
        "optimizers": _optimizers(),
        "schedulers": _schedulers(),
        "trainer_fills": _trainer_fills(),
    }


def _section_by_reading(path: str, sections: dict[str, Any]) -> None:
    """Adds the section at ``path`` that DeepSpeed reads key by key, and all sections inside it."""
    node, _ = _read(path)
    fields = {name: _scalar(default) for name, default in node.defaults.items() if name != MARKER}
    is_open = path.partition(".")[0] in OPEN_SECTIONS or (bool(path) and node.handed_on_whole)
    sections[path] = {"closed": False, "open": is_open, "fields": dict(sorted(fields.items()))}
    for name, default in list(node.defaults.items()):
        if name == MARKER or default not in (None, {}) or isinstance(default, bool):
            continue
        inner = f"{path}.{name}" if path else name
        if inner in CONSTRUCTOR_PARAMETERS:
            fields[name] = {"types": ["dict"], "default": {}}
            continue
        try:
            child, model = _read(inner)
        except Exception:  # noqa: BLE001  (a key that is no section refuses a dictionary in its own way)
            continue
        if model is not None:
            fields[name] = {"section": inner}
            _section_of_model(inner, model, sections)
        elif child.defaults.keys() - {MARKER} or child.handed_on_whole:
            fields[name] = {"section": inner}
            _section_by_reading(inner, sections)
    sections[path]["fields"] = dict(sorted(fields.items()))


def _read(path: str) -> tuple[Recording, type | None]:
    """What DeepSpeed asks of the section at ``path``, and the pydantic model that took it, if one did."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    root = node = Recording({"train_batch_size": 1})
    for name in path.split(".") if path else []:
        child = Recording({**SEEDS.get(name, {}), MARKER: True})
        dict.__setitem__(node, name, child)
        node = child
    taken: list[type] = []
    original = DeepSpeedConfigModel.__init__

    def init(self: Any, strict: bool = False, **data: Any) -> None:
        if data.pop(MARKER, False):
            taken.append(type(self))
        original(self, strict, **data)

    DeepSpeedConfigModel.__init__ = init
    try:
        DeepSpeedConfig(root)
    finally:
        DeepSpeedConfigModel.__init__ = original
    return node, taken[-1] if taken else None


def _scalar(default: Any) -> dict[str, Any]:
    """A key that is read as it is: what is known of its type is the type of its default."""
    if default is None or default == "auto" or isinstance(default, (dict, list)):
        return {"types": ["any"], "default": default}
    return {"types": [type(default).__name__], "default": default}


def _section_of_model(path: str, model: Any, sections: dict[str, Any]) -> None:
    """Adds the section that a pydantic model takes; it refuses unknown keys."""
    fields: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        inner = _model_in(info.annotation)
        key = info.alias or name
        if inner is not None:
            fields[key] = {"section": f"{path}.{key}", "null": type(None) in typing.get_args(info.annotation)}
            _section_of_model(f"{path}.{key}", inner, sections)
        else:
            fields[key] = _field(info)
        if info.alias:
            fields[key]["also"] = name
        extra = info.json_schema_extra or {}
        if extra.get("deprecated"):
            fields[key]["deprecated"] = extra.get("new_param", "")
    sections[path] = {"closed": True, "open": False, "fields": dict(sorted(fields.items()))}


def _field(info: Any) -> dict[str, Any]:
    kinds: set[str] = set()
    choices: list[Any] = []
    _kinds(info.annotation, kinds, choices)
    default = info.get_default(call_default_factory=True)
    found: dict[str, Any] = {"types": sorted(kinds), "default": _plain(default)}
    if choices:
        found["choices"] = choices
    for limit in info.metadata:
        for bound in ("ge", "gt", "le", "lt"):
            if hasattr(limit, bound):
                found[bound] = getattr(limit, bound)
    return found


def _kinds(annotation: Any, kinds: set[str], choices: list[Any]) -> None:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            _kinds(part, kinds, choices)
    elif origin is typing.Literal:
        kinds.add("choice")
        choices.extend(typing.get_args(annotation))
    elif annotation is type(None):
        kinds.add("null")
    elif origin in (list, tuple, dict):
        kinds.add("dict" if origin is dict else "list")
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        kinds.add("choice")
        choices.extend(item.value for item in annotation)
    elif annotation in (bool, int, float, str, list, dict):
        kinds.add(annotation.__name__)
    elif annotation is Path:
        kinds.add("str")
    else:
        kinds.add("any")


def _model_in(annotation: Any) -> Any:
    from pydantic import BaseModel

    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _plain(default: Any) -> Any:
    if isinstance(default, bool) or default is None:
        return default
    if isinstance(default, int):
        return int(default)
    return default if isinstance(default, (float, str, list, dict)) else str(default)


def _add_stages(fields: dict[str, Any]) -> None:
    """Notes the stages at which the engine reads a field, where that is not all of them."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    branch = next(
        node
        for node in ast.walk(_tree(DeepSpeedEngine._configure_zero_optimizer))
        if isinstance(node, ast.If) and "ZeroStageEnum.gradients" in ast.unparse(node.test)
    )
    split, whole = _fields_read(branch.body), _fields_read(branch.orelse)
    for key, field in fields.items():
        name = field.get("also", key)
        if name in split - whole:
            field["stages"] = [1, 2]
        elif name in whole - split or key.startswith("stage3_"):
            field["stages"] = [3]
        elif key != "stage" and "deprecated" not in field:
            field["stages"] = [1, 2, 3]


def _fields_read(body: list[ast.stmt]) -> set[str]:
    """Fields of ``zero_config`` that are returned by the engine's accessors called in ``body``."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    called = {
        node.func.attr
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    found = set()
    for name in called:
        accessor = getattr(DeepSpeedEngine, name, None)
        if inspect.isfunction(accessor) and len(inspect.getsource(accessor).splitlines()) < 5:
            for node in ast.walk(_tree(accessor)):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("zero_config"):
                    found.add(node.attr)
    return found


def _tree(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _optimizers() -> dict[str, Any]:
    """Lower-case name of DeepSpeed's own, or torch's name -> what is known of it.

    ``parameters`` of the constructor by device ("gpu", "cpu" where states are offloaded, "torch"), and whether
    it is ``tested`` with ZeRO.
    """
    import torch
    from deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
    from deepspeed.ops.adam.fused_adam import FusedAdam
    from deepspeed.ops.lamb.fused_lamb import FusedLamb
    from deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
    from deepspeed.ops.lion.fused_lion import FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    own: dict[str, dict[str, Any]] = {
        "adam": {"gpu": FusedAdam, "cpu": DeepSpeedCPUAdam, "torch": torch.optim.AdamW},
        "adamw": {"gpu": FusedAdam, "cpu": DeepSpeedCPUAdam, "torch": torch.optim.AdamW},
        "adagrad": {"gpu": torch.optim.Adagrad, "cpu": DeepSpeedCPUAdagrad},
        "lamb": {"gpu": FusedLamb},
        "lion": {"gpu": FusedLion, "cpu": DeepSpeedCPULion},
    }
    # DeepSpeed adds Muon to the tested ones when it is used; the parameters of those without classes are not known.
    found: dict[str, Any] = {
        name: {"tested": name == "muon", "parameters": {}} for name in DEEPSPEED_OPTIMIZERS if name not in own
    }
    for name, kind in sorted(vars(torch.optim).items()):
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            own.setdefault(name, {"torch": kind})
    for name, classes in own.items():
        found[name] = {
            "tested": all(kind in ZERO_SUPPORTED_OPTIMIZERS for kind in classes.values()),
            "parameters": {device: sorted(_parameters(kind)) for device, kind in classes.items()},
        }
    return dict(sorted(found.items()))


def _schedulers() -> dict[str, Any]:
    """Name -> parameters of the constructor: whether each is required."""
    import torch
    from deepspeed.runtime import lr_schedules

    kinds = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    for name, kind in sorted(vars(torch.optim.lr_scheduler).items()):
        if isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
            kinds.setdefault(name, kind)
    for name in ("LRScheduler", "_LRScheduler", "ChainedScheduler", "SequentialLR"):
        kinds.pop(name, None)  # abstract, or made of other schedulers, which JSON cannot hold
    return {name: _parameters(kind) for name, kind in kinds.items()}


def _trainer_fills() -> list[str]:
    """Paths at which the Hugging Face trainer replaces "auto"."""
    found = importlib.util.find_spec("transformers.integrations.deepspeed")
    assert found is not None
    assert found.origin is not None
    calls = [node for node in ast.walk(ast.parse(Path(found.origin).read_text())) if isinstance(node, ast.Call)]
    filled = [call.args[0] for call in calls if ast.unparse(call.func) in ("self.fill_match", "self.fill_only")]
    return sorted({argument.value for argument in filled if isinstance(argument, ast.Constant)})


def _parameters(kind: Any) -> dict[str, bool]:
    listed = list(inspect.signature(kind.__init__).parameters.values())[2:]  # self, and what it works on
    named = [item for item in listed if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)]
    return {item.name: item.default is item.empty for item in named}


if __name__ == "__main__":
    json.dump(extract(), sys.stdout, indent=1)
    sys.stdout.write("\n")
