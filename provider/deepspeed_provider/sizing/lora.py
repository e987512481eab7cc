# SPDX-License-Identifier: Apache-2.0
"""Which matrices LoRA adapts, with which rank, and how many parameters that makes.

Follows PEFT 0.21 on transformers 5: an adapter of rank r beside a matrix of in x out features has
r * (in + out) parameters. Mixtures of experts are special, see ``EXPERT_NAMES``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final

from deepspeed_provider.errors import FieldProblem, SpecError
from deepspeed_provider.sizing.architecture import Architecture, Linear

ALL_LINEAR: Final = "all-linear"

ROLES_OF_ALIAS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "q": frozenset({"q", "qkv"}),
        "k": frozenset({"k", "qkv"}),
        "v": frozenset({"v", "qkv"}),
        "o": frozenset({"o"}),
        "gate": frozenset({"gate", "gate_up", "shared_gate"}),
        "up": frozenset({"up", "gate_up", "shared_up"}),
        "down": frozenset({"down", "shared_down"}),
    }
)

# PEFT knows the experts of these model types by the module names they had in transformers 4 and
# puts adapters on the fused parameters that hold them now (peft.utils.transformers_weight_conversion).
# name in transformers 4 -> (alias, role of the parameter now)
_MIXTRAL_NAMES: Final = {
    "gate": ("", "router"),
    "w1": ("gate", "gate_up"),
    "w3": ("up", "gate_up"),
    "w2": ("down", "down"),
}
_QWEN_NAMES: Final = {
    "gate": ("", "router"),
    "gate_proj": ("gate", "gate_up"),
    "up_proj": ("up", "gate_up"),
    "down_proj": ("down", "down"),
}
EXPERT_NAMES: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = MappingProxyType(
    {
        **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _MIXTRAL_NAMES),
        **dict.fromkeys(
            ("qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "ernie4_5_moe", "flex_olmo"),
            _QWEN_NAMES,
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """LoRA's adapters on one architecture.

    ``ranks`` holds the rank beside one copy of each adapted matrix: the asked one, but twice that
    beside the fused gate and up projections of experts, whose two adapters PEFT keeps side by side.
    """

    architecture: Architecture
    ranks: Mapping[Linear, int]
    warnings: tuple[str, ...] = ()

    def rank_of(self, linear: Linear) -> int:
        """0 where there is no adapter."""
        return self.ranks.get(linear, 0)

    def parameters_of(self, linear: Linear) -> int:
        """Of the adapters beside this matrix and all its copies, in one layer."""
        return self.rank_of(linear) * (linear.in_features + linear.out_features) * linear.copies

    @cached_property
    def parameters(self) -> int:
        """Of all adapters: what LoRA trains."""
        layers = self.architecture.layers
        inside = sum(layer.count * self.parameters_of(linear) for layer in layers for linear in layer.linears)
        return inside + sum(self.parameters_of(linear) for linear in embedding_projections(self.architecture))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The adapted modules' names."""
        return tuple(sorted({linear.module for linear in self.ranks}))


def adapters(architecture: Architecture, *, rank: int, targets: str | Sequence[str]) -> Adapters:
    """The adapters for ``targets``: ``all-linear``, or names, in a list or separated by commas.

    A name is one of q, k, v, o, gate, up, down (whatever the model calls it; a fused matrix is hit
    once) or a module's own name, such as q_proj or c_attn. ``all-linear`` leaves out the head.
    Raises :class:`SpecError` for a rank below 1 and for names that the model does not have.
    """
    _refuse_unusable_rank(rank)
    asked = [targets] if isinstance(targets, str) and targets == ALL_LINEAR else _split(targets)
    names, warnings = _names(architecture, asked)
    converted = _converted_names(architecture)
    expert_roles = _expert_roles(names, converted)
    ranks: dict[Linear, int] = {}
    for linear in _linears(architecture):
        if linear.is_module:
            # A name that PEFT converts to expert parameters no longer finds the modules so called.
            if linear.module in names and linear.module not in converted:
                ranks[linear] = rank
        elif linear.role in expert_roles:
            ranks[linear] = 2 * rank if linear.role == "gate_up" else rank
    if _has_experts(architecture) and not converted and not {ALL_LINEAR, "gate", "up", "down"}.isdisjoint(asked):
        warnings.append("PEFT puts no adapters on the routed experts of this model: they are no modules of their own.")
    return Adapters(architecture=architecture, ranks=MappingProxyType(ranks), warnings=tuple(warnings))


def embedding_projections(architecture: Architecture) -> tuple[Linear, ...]:
    """The matrices between a narrower embedding and the layers (OPT 350M); none in other models."""
    if not architecture.embedding_projection_parameters:
        return ()
    narrow, hidden = architecture.embedding_width, architecture.hidden_size
    return (
        Linear(role="project_in", module="project_in", in_features=narrow, out_features=hidden),
        Linear(role="project_out", module="project_out", in_features=hidden, out_features=narrow),
    )


def _linears(architecture: Architecture) -> Iterable[Linear]:
    for layer in architecture.layers:
        yield from layer.linears
    yield from embedding_projections(architecture)


def _has_experts(architecture: Architecture) -> bool:
    return any(layer.experts is not None for layer in architecture.layers)


def _converted_names(architecture: Architecture) -> Mapping[str, tuple[str, str]]:
    return EXPERT_NAMES.get(architecture.model_type, {}) if _has_experts(architecture) else {}


def _split(targets: str | Sequence[str]) -> list[str]:
    parts = targets.split(",") if isinstance(targets, str) else list(targets)
    return [part.strip() for part in parts if part.strip()]


def _names(architecture: Architecture, asked: Sequence[str]) -> tuple[frozenset[str], list[str]]:
    """The module names that the targets stand for, and what was passed over."""
    converted = _converted_names(architecture)
    known = {linear.module for linear in _linears(architecture) if linear.is_module} | set(converted)
    if list(asked) == [ALL_LINEAR]:
        return frozenset(known), []
    names: set[str] = set()
    absent = []
    problems = []
    for target in asked:
        if target in ROLES_OF_ALIAS:
            found = _names_of_alias(architecture, target, converted)
            names |= found
            if not found:
                absent.append(target)
        elif target in known:
            names.add(target)
        elif target == ALL_LINEAR:
            problems.append(
                FieldProblem(
                    field="lora_targets",
                    value=",".join(asked),
                    problem="'all-linear' stands for all of them and goes with no other name",
                    suggestion="Use 'all-linear' alone, or the names alone.",
                )
            )
        else:
            problems.append(_unknown_target(target, known))
    if not names and not problems:
        problems.append(_unknown_target(",".join(asked), known))
    if problems:
        raise SpecError(problems)
    return frozenset(names), [f"This model has no {alias} projection: that target adapts nothing." for alias in absent]


def _names_of_alias(architecture: Architecture, alias: str, converted: Mapping[str, tuple[str, str]]) -> set[str]:
    roles = ROLES_OF_ALIAS[alias]
    modules = {linear.module for linear in _linears(architecture) if linear.is_module and linear.role in roles}
    return modules | {name for name, (of_alias, _) in converted.items() if of_alias == alias}


def _expert_roles(names: frozenset[str], converted: Mapping[str, tuple[str, str]]) -> frozenset[str]:
    """The expert parameters that the names stand for; gate and up are fused, so they come together."""
    roles = {role for name, (_, role) in converted.items() if name in names}
    if "gate_up" in roles:
        fused = [name for name, (_, role) in converted.items() if role == "gate_up"]
        missing = [name for name in fused if name not in names]
        if missing:
            present = next(name for name in fused if name in names)
            raise SpecError(
                [
                    FieldProblem(
                        field="lora_targets",
                        value=present,
                        problem="is fused with its partner in this model's experts",
                        suggestion=f"Name {' and '.join(fused)} together, or neither.",
                    )
                ]
            )
    return frozenset(roles)


def _unknown_target(target: str, known: Iterable[str]) -> FieldProblem:
    return FieldProblem(
        field="lora_targets",
        value=target,
        problem="names no module of this model",
        suggestion=f"Use {ALL_LINEAR}, {', '.join(ROLES_OF_ALIAS)}, or this model's names: {', '.join(sorted(known))}.",
    )


def _refuse_unusable_rank(rank: int) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise SpecError(
            [
                FieldProblem(
                    field="lora_rank", value=rank, problem="is no rank", suggestion="Use a whole number, such as 16."
                )
            ]
        )
