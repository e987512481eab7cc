# SPDX-License-Identifier: Apache-2.0
"""Docstrings as prose: the summary, the parameters and the return value, in plain text.

Reads the three layouts in use (numpydoc, Google, Sphinx fields). Standard library only.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

SUMMARY_CHARACTERS = 500
PARAMETER_CHARACTERS = 140
RETURNS_CHARACTERS = 300
TYPE_CHARACTERS = 80

_PARAMETER_HEADERS = {"parameters", "args", "arguments", "params"}
_RETURN_HEADERS = {"returns", "return"}
_OTHER_HEADERS = {
    *("attributes", "raises", "yields", "examples", "example", "notes", "note", "see also", "warns", "warnings"),
    *("warning", "references", "keyword args", "keyword arguments", "other parameters", "shape", "methods", "usage"),
    *("inputs", "outputs", "todo", "tip", "important"),
}
_HEADERS = _PARAMETER_HEADERS | _RETURN_HEADERS | _OTHER_HEADERS

_FIELD = re.compile(r"^:(?P<kind>param|parameter|arg|return|returns|\w+)(?P<argument>\s[^:]*)?:(?:\s+(?P<text>.*))?$")
_NUMPY_ENTRY = re.compile(r"^(?P<name>[*\w][*\w, ]*?)(?:\s*:\s*(?P<type>.+))?$")
_GOOGLE_ENTRY = re.compile(r"^(?P<name>[*`]*\w+[`]*)\s*(?:\((?P<type>[^)]*(?:\([^)]*\)[^)]*)*)\))?\s*:\s*(?P<text>.*)$")
_SIGNATURE = re.compile(r"^[\w.]+\(.*\)\s*(?:->.*)?$", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<!i\.e)(?<!e\.g)(?<!etc)(?<!vs)[.!?](?=\s)")
_DIRECTIVE = re.compile(r"^(?:\.\. |>>> |\.\.\w|[|+][-=+| ]|```|---|===|\* |- )")

_MARKUP = [
    (re.compile(r":[\w:.+-]+:`(?:[^`<]*<)?[~!.]*([^`>]+)>?`"), r"`\1`"),  # :class:`~torch.Tensor`
    (re.compile(r"\[`~?([^`\]]+)`\](?:\([^)]*\))?"), r"`\1`"),  # [`Trainer`], as transformers writes it
    (re.compile(r"`([^`<]+?)\s*<[^`>]+>`_{1,2}"), r"\1"),  # `text <address>`_
    (re.compile(r"``([^`]+)``"), r"`\1`"),
    (re.compile(r"\[\d+\]_"), ""),  # footnote marks
    (re.compile(r"\|(\w+)\|"), r"\1"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    name: str
    type: str
    text: str

    def __str__(self) -> str:
        return f"- `{self.name}`" + (f" ({self.type})" if self.type else "") + (f": {self.text}" if self.text else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Docstring:
    """Plain text without line breaks inside; an absent part is empty."""

    summary: str
    parameters: tuple[Parameter, ...]
    returns: str


def parse(raw: str) -> Docstring:
    """Reads a docstring as written, indented or not."""
    sections = _sections(inspect.cleandoc(raw).splitlines())
    parameters: list[Parameter] = []
    returns = ""
    for header, lines in sections[1:]:
        if header in _PARAMETER_HEADERS and not parameters:
            parameters = _parameters(lines)
        elif header in _RETURN_HEADERS and not returns:
            returns = _returns(lines)
    return Docstring(summary=_summary(sections[0][1]), parameters=tuple(parameters), returns=returns)


def plain(text: str) -> str:
    """One line of text without mark-up."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return re.sub(r"\s+", " ", text).strip()


def bounded(text: str, characters: int) -> str:
    """Whole sentences of ``text`` within ``characters``; the first one cut at a word when it alone is longer."""
    if len(text) <= characters:
        return text
    start = text[: characters + 1]
    ends = [match.end() for match in _SENTENCE_END.finditer(start)]
    return start[: ends[-1]] if ends else start[: max(start.rfind(" "), 1)].rstrip(" ,;:") + " ..."


def _sections(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Header (lower case; empty for the opening) and lines of each section, in order."""
    sections: list[tuple[str, list[str]]] = [("", [])]
    skip = False
    for number, line in enumerate(lines):
        if skip:
            skip = False
            continue
        following = lines[number + 1] if number + 1 < len(lines) else ""
        header, underlined = _header(line, following)
        field = _FIELD.match(line)
        if header:
            sections.append((header, []))
            skip = underlined
        elif field:
            _add_field(sections, field)
        else:
            sections[-1][1].append(line)
    return sections


def _header(line: str, following: str) -> tuple[str, bool]:
    """The section that ``line`` opens, if any, and whether ``following`` is its rule."""
    if line.startswith((" ", "\t")):
        return "", False
    if following and re.fullmatch(r"\s*[-=~]{3,}\s*", following):
        return line.strip().rstrip(":").lower() or "unnamed", True
    name = line.strip().lower()
    return (name[:-1], False) if name.endswith(":") and name[:-1] in _HEADERS else ("", False)


def _add_field(sections: list[tuple[str, list[str]]], field: re.Match[str]) -> None:
    """Turns a Sphinx field into the Google layout, so that one reader serves both."""
    kind, argument, text = field["kind"], (field["argument"] or "").split(), field["text"] or ""
    if kind in ("param", "parameter", "arg") and argument:
        if sections[-1][0] != "params":
            sections.append(("params", []))
        type_name = f" ({' '.join(argument[:-1])})" if argument[:-1] else ""
        sections[-1][1].append(f"{argument[-1]}{type_name}: {text}")
    elif kind in _RETURN_HEADERS:
        sections.append(("returns", [f"    {text}"]))
    else:
        sections.append((f"field {kind}", [text]))


def _summary(lines: list[str]) -> str:
    paragraphs: list[str] = []
    for paragraph in _paragraphs(lines):
        if _SIGNATURE.match(paragraph.strip()) and not paragraphs:
            continue
        if _DIRECTIVE.match(paragraph.lstrip()) or paragraph.startswith(("    ", "\t")):
            break
        paragraphs.append(plain(paragraph))
        if paragraph.rstrip().endswith(":"):  # what it announces is code or a list, which stays out
            break
        if sum(map(len, paragraphs)) > SUMMARY_CHARACTERS:
            break
    # numpydoc and torch's C functions open with a one-line signature glued to the text.
    text = re.sub(r"^[\w.]+\([^)]*\)\s*->\s*[\w.\[\], ]+?\s(?=[A-Z])", "", " ".join(filter(None, paragraphs)))
    if text.endswith(":"):
        text = re.sub(r"(?:^|(?<=[.!?])\s)[^.!?]*:$", "", text)
    return bounded(text.strip(), SUMMARY_CHARACTERS)


def _paragraphs(lines: list[str]) -> list[str]:
    return [part.strip("\n") for part in re.split(r"\n\s*\n", "\n".join(lines)) if part.strip()]


def _parameters(lines: list[str]) -> list[Parameter]:
    entries: list[Parameter] = []
    for head, body in _entries(lines):
        google = _GOOGLE_ENTRY.match(head)
        numpy = None if google and (google["type"] or google["text"]) else _NUMPY_ENTRY.match(head)
        if numpy:
            name, type_name, text = numpy["name"], numpy["type"] or "", ""
            # "x : int" is numpydoc; "x: text", without a body, is Google's entry without a type.
        elif google:
            name, type_name, text = google["name"], google["type"] or "", google["text"]
            if not google["type"] and body and " : " in head:
                type_name, text = text, ""
        else:
            continue
        text = bounded(plain(f"{text} {_prose(body)}"), PARAMETER_CHARACTERS)
        if text or type_name:
            entries.append(Parameter(name=name.strip("*` "), type=_type(type_name), text=text))
    return entries


def _type(text: str) -> str:
    return bounded(re.sub("[`*]", "", plain(text)), TYPE_CHARACTERS)


def _entries(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Splits a section at its outermost indentation: head line and the deeper lines under it."""
    filled = [line for line in lines if line.strip()]
    if not filled:
        return []
    outer = min(len(line) - len(line.lstrip()) for line in filled)
    entries: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) == outer:
            entries.append((line.strip(), []))
        elif entries:
            entries[-1][1].append(line)
    return entries


def _returns(lines: list[str]) -> str:
    entries = _entries(lines)
    if not entries or _DIRECTIVE.match(entries[0][0]):
        return ""
    head, body = entries[0]
    if body and _prose(body) and len(head) < 60 and not head.endswith("."):
        return bounded(plain(f"{head.rstrip(':')}: {_prose(body)}"), RETURNS_CHARACTERS)
    return bounded(plain(_paragraphs([line.strip() for line in lines])[0]), RETURNS_CHARACTERS)


def _prose(lines: list[str]) -> str:
    """The first paragraph of an entry's body, before any list, directive or example."""
    kept: list[str] = []
    for line in lines:
        if _DIRECTIVE.match(line.strip()) or (kept and not line.strip()):
            break
        if line.strip():
            kept.append(line.strip())
    return " ".join(kept)
