# SPDX-License-Identifier: Apache-2.0
"""Reads numbers from a config.json and keeps every problem, so that a user sees all of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deepspeed_provider.errors import FieldProblem, SpecError

REQUIRED: Final = -1
# Beyond any model there is; larger numbers are slips of a keyboard, and would be counted for ever.
LARGEST: Final = 10**9
MOST_LAYERS: Final = 10_000

# Fields that go by several names; the first is today's.
WIDTH: Final = ("hidden_size", "n_embd", "d_model", "n_embed")
LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KEY_VALUE_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv")


class ConfigFields:
    """A config's fields under their present and their older names.

    A reader asks for what it needs and gets a usable number even for a broken field; ``finish``
    raises :class:`SpecError` with all problems met on the way.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[FieldProblem] = []

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    def name_in_use(self, *names: str) -> str | None:
        """The first of the names that the config has."""
        return next((name for name in names if name in self.config), None)

    def integer(self, *names: str, default: int = REQUIRED, if_null: int | None = None, minimum: int = 1) -> int:
        """The first of the fields that the config has; ``default`` where it has none, ``if_null`` for a null."""
        name = self.name_in_use(*names)
        value = self.config.get(name) if name is not None else None
        if value is None:
            fallback = default if name is None or if_null is None else if_null
            if fallback != REQUIRED:
                return fallback
            self._refuse(name or names[0], value, "is missing", self._wanted(minimum, names))
            return max(minimum, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= LARGEST:
            self._refuse(str(name), value, "is not usable", self._wanted(minimum, names[:1]))
            return max(minimum, 1)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._refuse(name, value, "is not usable", "Use true or false.")
        return bool(value)

    def number(self, *names: str, default: float) -> float:
        """A probability or factor, not negative."""
        name = self.name_in_use(*names)
        value = self.config.get(name) if name is not None else None
        if value is None:
            return default
        return self._checked_number(str(name), value, default)

    def _checked_number(self, name: str, value: Any, default: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
            self._refuse(name, value, "is not usable", "Use a number of at least 0.")
            return default
        return float(value)

    def layers(self, *names: str) -> int:
        """How many layers there are."""
        count = self.integer(*names)
        if count > MOST_LAYERS:
            self._refuse(names[0], count, "is not usable", f"Use a whole number from 1 to {MOST_LAYERS:,}.")
            return 1
        return count

    def text(self, *names: str, default: str) -> str:
        name = self.name_in_use(*names)
        value = self.config.get(name) if name is not None else None
        if value is None:
            return default
        if not isinstance(value, str):
            self._refuse(str(name), value, "is not usable", f"Use a name such as {default!r}.")
            return default
        return value

    def is_set(self, name: str, default: bool) -> bool:
        """Whether an optional number applies: absent means the default, an explicit null means no."""
        return self.config[name] is not None if name in self.config else default

    def section(self, *names: str) -> Mapping[str, Any]:
        """A nested object, empty where there is none."""
        for name in names:
            value = self.config.get(name)
            if isinstance(value, Mapping):
                return value
            if value is not None:
                self._refuse(name, value, "is not usable", "Use an object, or leave it out.")
        return {}

    def indices(self, name: str) -> frozenset[int]:
        value = self.config.get(name) or []
        if not isinstance(value, list | tuple) or any(not isinstance(index, int) for index in value):
            self._refuse(name, value, "is not usable", "Use a list of layer indices.")
            return frozenset()
        return frozenset(value)

    def refuse_unless_divides(self, name: str, value: int, of_name: str, of: int) -> None:
        """``value`` has to divide ``of``; says nothing where one of them is already refused."""
        name, of_name = self._as_written(name), self._as_written(of_name)
        refused = {problem.field for problem in self.problems}
        if of % value and refused.isdisjoint((name, of_name)):
            self._refuse(name, value, f"does not divide {of_name} = {of}", f"Use a divisor of {of}.")

    def _as_written(self, name: str) -> str:
        """The name under which the config has it, where an older one was read."""
        older = next((names for names in (WIDTH, LAYERS, HEADS, KEY_VALUE_HEADS) if name in names), (name,))
        return self.name_in_use(*older) or name

    def finish(self) -> None:
        if self.problems:
            raise SpecError(self.problems)

    def _refuse(self, field: str, value: Any, problem: str, suggestion: str) -> None:
        entry = FieldProblem(field=field, value=value, problem=problem, suggestion=suggestion)
        if entry not in self.problems:
            self.problems.append(entry)

    @staticmethod
    def _wanted(minimum: int, names: tuple[str, ...]) -> str:
        other = f" (also read as {', '.join(names[1:])})" if len(names) > 1 else ""
        return f"Use a whole number of at least {minimum} (and at most {LARGEST:,}){other}."
