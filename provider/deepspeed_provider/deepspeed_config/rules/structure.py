# SPDX-License-Identifier: Apache-2.0
"""Keys and single values, judged by the schema alone."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from deepspeed_provider.deepspeed_config.findings import Facts, Found, Launcher, Severity
from deepspeed_provider.deepspeed_config.rules.precision import LIKE_A_PRECISION
from deepspeed_provider.deepspeed_config.rules.rule import Example, Rule, config, zero
from deepspeed_provider.deepspeed_config.schema import Section, schema
from deepspeed_provider.deepspeed_config.subject import AUTO, Subject, Visit
from deepspeed_provider.deepspeed_config.values import misfit

# Share of equal letters from which an unknown key is taken for a misspelt one.
_SIMILAR: Final = 0.8
_OPTIMIZER: Final = {"type": "AdamW", "params": {"lr": 1e-5}}


def _unknown(subject: Subject) -> Iterator[Visit]:
    for visit in subject.visits:
        known = visit.section is None or visit.section.open or visit.field is not None
        if not known and visit.path not in schema().removed:
            yield visit


def _near(section: Section, name: str) -> str | None:
    near = difflib.get_close_matches(name.lower(), section.fields, n=1, cutoff=_SIMILAR)
    return near[0] if near else None


def _elsewhere(visit: Visit) -> str:
    """Other sections in which DeepSpeed knows the key, as a sentence."""
    places = [path for path, section in schema().sections.items() if visit.name in section.fields and not section.open]
    if len(places) > 3:
        return ""
    names = [repr(path) if path else "the top level" for path in places]
    return f"It belongs to {' or '.join(names)}." if names else ""


def _refused_keys(subject: Subject) -> Iterable[Found]:
    for visit in _unknown(subject):
        if visit.section is not None and visit.section.closed:
            near = _near(visit.section, visit.name)
            hint = f"Did you mean {near!r}?" if near else _elsewhere(visit) or "Remove it."
            yield Found(path=visit.path, value=visit.value, problem="DeepSpeed knows no such key.", suggestion=hint)


def _ignored_keys(subject: Subject) -> Iterable[Found]:
    for visit in _unknown(subject):
        if visit.section is not None and not visit.section.closed:
            near = _near(visit.section, visit.name)
            hint = f"Did you mean {near!r}?" if near else _elsewhere(visit)
            if hint:
                text = "DeepSpeed knows no such key here, and ignores it."
                yield Found(path=visit.path, value=visit.value, problem=text, suggestion=hint)


def _foreign_keys(subject: Subject) -> Iterable[Found]:
    for visit in _unknown(subject):
        known = visit.section is None or visit.section.closed or _near(visit.section, visit.name) or _elsewhere(visit)
        note = visit.name.startswith("_")  # a usual way to write a comment
        if not known and not note and not LIKE_A_PRECISION.fullmatch(visit.name):
            text, hint = "DeepSpeed knows no such key, and ignores it.", "Remove it if nobody reads it."
            yield Found(path=visit.path, value=visit.value, problem=text, suggestion=hint)


def _removed_keys(subject: Subject) -> Iterable[Found]:
    for visit in subject.visits:
        if visit.path in schema().removed:
            text = f"DeepSpeed refuses it. {schema().removed[visit.path]}"
            yield Found(path=visit.path, value=visit.value, problem=text, suggestion="Remove it.")


def _deprecated_keys(subject: Subject) -> Iterable[Found]:
    for visit in subject.visits:
        if visit.field is not None and visit.field.deprecated is not None:
            hint = f"Use {visit.field.deprecated}." if visit.field.deprecated else "Remove it."
            yield Found(path=visit.path, value=visit.value, problem="is deprecated.", suggestion=hint)
    whole = subject.config.get("zero_optimization")
    if isinstance(whole, bool):
        text = "is the form before there were stages; true means stage 1."
        hint = f'Write {{"stage": {int(whole)}}}.'
        yield Found(path="zero_optimization", value=whole, problem=text, suggestion=hint)


def _said_twice(subject: Subject) -> Iterable[Found]:
    paths = {visit.path for visit in subject.visits}
    for visit in subject.visits:
        if visit.field is None:
            continue
        around = visit.path.removesuffix(visit.name)
        for other in (visit.field.also, visit.field.deprecated):
            if other and other != visit.name and around + other in paths:
                text = f"says the same as {other!r}, which is there too."
                yield Found(path=visit.path, value=visit.value, problem=text, suggestion="Keep one of them.")


def _no_sections(subject: Subject) -> Iterable[Found]:
    for visit in subject.visits:
        if visit.field is None or visit.field.section is None or isinstance(visit.value, Mapping):
            continue
        allowed = (visit.value is None and _may_be_null(visit)) or (
            visit.path == "zero_optimization" and isinstance(visit.value, bool)
        )
        if not allowed and visit.value != AUTO:
            hint = "Write an object, or leave it out."
            yield Found(path=visit.path, value=visit.value, problem="should be an object.", suggestion=hint)


def _may_be_null(visit: Visit) -> bool:
    return (visit.field is not None and "null" in visit.field.types) or visit.path in ("bf16", "bfloat16", "aio")


def _values(kind: str) -> Callable[[Subject], Iterable[Found]]:
    def find(subject: Subject) -> Iterable[Found]:
        for visit in subject.visits:
            if visit.field is None or visit.field.section is not None or visit.value == AUTO or visit.section is None:
                continue
            found = misfit(visit.field, visit.value, converts=visit.section.closed)
            if found is not None and found.kind == kind:
                yield Found(path=visit.path, value=visit.value, problem=found.problem, suggestion=found.suggestion)

    return find


def _autos(subject: Subject) -> Iterable[Found]:
    if not subject.hugging_face:
        for visit in _meaningless_autos(subject):
            yield Found(path=visit.path, value=AUTO, problem=_auto_means(visit), suggestion="Write the value.")


def _autos_left(subject: Subject) -> Iterable[Found]:
    if subject.hugging_face:
        for visit in _meaningless_autos(subject):
            if visit.path not in schema().trainer_fills:
                text = "the Hugging Face trainer does not replace it here, and DeepSpeed takes its own default."
                yield Found(path=visit.path, value=AUTO, problem=text, suggestion="Write the value.")


def _meaningless_autos(subject: Subject) -> Iterator[Visit]:
    """Where "auto" is not DeepSpeed's own word for a default."""
    for visit in subject.visits:
        is_open = visit.section is not None and visit.section.open
        own = visit.field is not None and visit.field.default == AUTO
        if visit.value == AUTO and not is_open and not own:
            yield visit


def _auto_means(visit: Visit) -> str:
    only = "only the Hugging Face trainer replaces it;"
    if visit.path in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled"):
        return f"{only} DeepSpeed takes it as off, and trains in fp32."
    if visit.field is not None and visit.section is not None and visit.section.closed:
        return f"{only} DeepSpeed takes its own default, {visit.field.default!r}."
    return f"{only} DeepSpeed reads the text itself."


RULES: Final = (
    Rule(
        name="unknown-key",
        severity=Severity.ERROR,
        why="DeepSpeed refuses unknown keys in the sections that its pydantic models read.",
        find=_refused_keys,
        accepted=Example(zero(2, reduce_bucket_size=1_000_000)),
        refused=Example(zero(2, reduce_bucket_sise=1_000_000)),
    ),
    Rule(
        name="ignored-key",
        severity=Severity.ERROR,
        why="At the top level and in sections read key by key, a misspelt or misplaced key is silently ignored.",
        find=_ignored_keys,
        accepted=Example(config(gradient_clipping=1.0)),
        refused=Example(config(gradient_cliping=1.0)),
    ),
    Rule(
        name="foreign-key",
        severity=Severity.WARNING,
        why="A key that resembles none of DeepSpeed's has no effect.",
        find=_foreign_keys,
        accepted=Example(config(dump_state=True)),
        refused=Example(config(zzz_my_notes="tried on Monday")),
    ),
    Rule(
        name="removed-key",
        severity=Severity.ERROR,
        why="DeepSpeed refuses keys of features that it has dropped.",
        find=_removed_keys,
        accepted=Example(config(fp16={"enabled": True})),
        refused=Example(config(amp={"enabled": True})),
    ),
    Rule(
        name="deprecated-key",
        severity=Severity.WARNING,
        why="DeepSpeed still translates the old key.",
        find=_deprecated_keys,
        accepted=Example(zero(2, offload_optimizer={"device": "cpu"}) | {"optimizer": _OPTIMIZER}),
        refused=Example(zero(2, cpu_offload=True) | {"optimizer": _OPTIMIZER}),
    ),
    Rule(
        name="said-twice",
        severity=Severity.ERROR,
        why="DeepSpeed refuses two names of one field, or a deprecated key beside its replacement.",
        find=_said_twice,
        accepted=Example(zero(3, stage3_max_live_parameters=1_000_000_000)),
        refused=Example(zero(3, stage3_max_live_parameters=1_000_000_000, max_live_parameters=2_000_000_000)),
    ),
    Rule(
        name="no-section",
        severity=Severity.ERROR,
        why="Where DeepSpeed reads a section, a plain value fails or is taken for nothing.",
        find=_no_sections,
        accepted=Example(config(bf16={"enabled": True})),
        refused=Example(config(bf16=True)),
    ),
    Rule(
        name="wrong-type",
        severity=Severity.ERROR,
        why="DeepSpeed refuses the value, or takes any text for true.",
        find=_values("wrong-type"),
        accepted=Example(zero(2, overlap_comm=True)),
        refused=Example(zero(2, overlap_comm="always")),
    ),
    Rule(
        name="loose-type",
        severity=Severity.WARNING,
        why="pydantic converts the value; other readers of the file may not.",
        find=_values("loose-type"),
        accepted=Example(config(bf16={"enabled": True})),
        refused=Example(config(bf16={"enabled": "true"})),
    ),
    Rule(
        name="out-of-bounds",
        severity=Severity.ERROR,
        why="DeepSpeed's models bound the value.",
        find=_values("out-of-bounds"),
        accepted=Example(zero(2, reduce_bucket_size=1_000_000)),
        refused=Example(zero(2, reduce_bucket_size=0)),
    ),
    Rule(
        name="not-a-choice",
        severity=Severity.ERROR,
        why="DeepSpeed takes only the listed values.",
        find=_values("not-a-choice"),
        accepted=Example(zero(2)),
        refused=Example(config(zero_optimization={"stage": 4})),
    ),
    Rule(
        name="stage-as-text",
        severity=Severity.ERROR,
        why="transformers compares the stage with numbers: at stage 3 as text, each rank loads the whole model.",
        find=_values("loose-choice"),
        accepted=Example(zero(2)),
        refused=Example(config(zero_optimization={"stage": "2"})),
    ),
    Rule(
        name="auto",
        severity=Severity.ERROR,
        why='Outside the Hugging Face trainer "auto" means off, a default, or a failure.',
        find=_autos,
        accepted=Example(config(bf16={"enabled": "auto"}), Facts(launcher=Launcher.HUGGING_FACE)),
        refused=Example(config(bf16={"enabled": "auto"})),
    ),
    Rule(
        name="auto-not-replaced",
        severity=Severity.WARNING,
        why='The Hugging Face trainer replaces "auto" at certain keys only.',
        find=_autos_left,
        accepted=Example(zero(2, reduce_bucket_size=AUTO), Facts(launcher=Launcher.HUGGING_FACE)),
        refused=Example(zero(2, allgather_bucket_size=AUTO), Facts(launcher=Launcher.HUGGING_FACE)),
    ),
)
