# SPDX-License-Identifier: Apache-2.0
"""A configuration as the rules look at it: whatever a person may have written in it, no look-up fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from deepspeed_provider.deepspeed_config.findings import Facts, Launcher
from deepspeed_provider.deepspeed_config.schema import Field, Section, schema

AUTO: Final = "auto"
# What pydantic reads as true, beside true itself.
_TRUE: Final = ("1", "true", "t", "yes", "y", "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One key of the configuration.

    Attributes:
        path: dotted, with the name that was written.
        section: where it stands, as DeepSpeed knows it; None inside a value that DeepSpeed hands on whole.
        field: None where DeepSpeed knows no such key.
    """

    path: str
    name: str
    value: Any
    section: Section | None
    field: Field | None


class Subject:
    """The configuration, with the facts of its use."""

    def __init__(self, config: Mapping[str, Any], facts: Facts) -> None:
        self.config = config
        self.facts = facts

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """Every key at every level that DeepSpeed knows, or hands on."""
        return tuple(_walk(self.config))

    def section(self, path: str) -> Mapping[str, Any]:
        """What is written there, under first names; empty where it is absent or no section."""
        node: Any = self.config
        for name in path.split(".") if path else []:
            node = node.get(name) if isinstance(node, Mapping) else None
        if not isinstance(node, Mapping):
            return {}
        known = schema().sections.get(path)
        return node if known is None else {known.canonical(str(key)): value for key, value in node.items()}

    def written(self, path: str) -> Any:
        """The value as it is written; None where it is absent."""
        section, _, name = path.rpartition(".")
        return self.section(section).get(name)

    def get(self, path: str) -> Any:
        """The value that DeepSpeed takes: its default where the key is absent or "auto"."""
        section, _, name = path.rpartition(".")
        value = self.section(section).get(name, AUTO)
        return schema().field(path).default if value == AUTO else value

    def on(self, path: str) -> bool:
        """A switch, as pydantic reads it."""
        value = self.get(path)
        return value.strip().lower() in _TRUE if isinstance(value, str) else bool(value)

    def number(self, path: str) -> float | None:
        """None where the value is no number."""
        value = self.get(path)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def hugging_face(self) -> bool:
        return self.facts.launcher is Launcher.HUGGING_FACE

    @property
    def stage(self) -> int:
        """Of ZeRO; 0 where it cannot be told."""
        whole = self.config.get("zero_optimization")
        if isinstance(whole, bool):
            return int(whole)  # the form before there were stages
        value = self.get("zero_optimization.stage")
        return int(value) if value in (0, 1, 2, 3) else 0

    def device(self, offload: str) -> str:
        """Where ``offload_optimizer`` or ``offload_param`` goes: ``none``, ``cpu`` or ``nvme``."""
        old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[offload]
        if self.on(f"zero_optimization.{old}"):
            return "cpu"
        return str(self.get(f"zero_optimization.{offload}.device"))

    @property
    def on_nvme(self) -> tuple[str, ...]:
        """Which of the two offloads go to NVMe; none below stage 3, whatever is written."""
        return (
            ()
            if self.stage < 3
            else tuple(name for name in ("offload_optimizer", "offload_param") if self.device(name) == "nvme")
        )

    @property
    def bf16(self) -> str:
        """The key under which DeepSpeed looks for bf16's section."""
        return "bf16" if self.config.get("bf16") is not None else "bfloat16"

    @property
    def precision(self) -> str:
        """``fp16``, ``bf16`` or ``fp32``."""
        if self.on("fp16.enabled"):
            return "fp16"
        return "bf16" if self.on(f"{self.bf16}.enabled") else "fp32"

    @property
    def optimizer(self) -> str | None:
        """As DeepSpeed names it: its own in lower case, torch's as written."""
        name = self.written("optimizer.type")
        if not isinstance(name, str):
            return None
        return name.lower() if name.lower() in schema().optimizers else name

    @property
    def on_torch(self) -> bool:
        """Whether torch's optimizer is named: by its own name, or by ``torch_adam``."""
        if self.optimizer in ("adam", "adamw"):
            return bool(self.section("optimizer.params").get("torch_adam"))
        known = schema().optimizers.get(self.optimizer or "")
        return known is not None and tuple(known.parameters) == ("torch",)


def _walk(config: Mapping[str, Any]) -> Iterator[Visit]:
    """Level by level, without recursion: a configuration may be nested as deeply as it likes."""
    waiting: deque[tuple[str, Section | None, Mapping[str, Any]]] = deque([("", schema().sections[""], config)])
    while waiting:
        path, section, content = waiting.popleft()
        for key, value in content.items():
            name, here = str(key), f"{path}.{key}" if path else str(key)
            field = None if section is None else section.fields.get(name)
            yield Visit(path=here, name=name, value=value, section=section, field=field)
            if isinstance(value, Mapping):
                inner = None if field is None or field.section is None else schema().sections[field.section]
                waiting.append((here, inner, value))
