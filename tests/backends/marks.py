"""The lines that ranks append when they start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Marks:
    path: Path

    def lines(self) -> list[dict[str, str]]:
        """One dict per started rank: name, rank, pid."""
        if not self.path.exists():
            return []
        return [
            dict([("name", line.split()[0]), *(word.split("=") for word in line.split()[1:])])
            for line in self.path.read_text().splitlines()
        ]

    def ranks(self) -> list[int]:
        return sorted(int(line["rank"]) for line in self.lines())

    def pids(self) -> list[int]:
        return [int(line["pid"]) for line in self.lines()]
