"""The record: how many mutants each module has, and those that no test notices, each under the reason why not.

A person moves a line of the last heading under another one, old or new; the command keeps it there for as long as the
mutant survives.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NEW = "Not looked at"
ENOUGH = 0.95
HEAD = """\
# Mutants

`make mutants` changes one thing of the code at a time, and expects a test to fail. It writes this file.
[Contributing](../../CONTRIBUTING.md#mutants) says what to do with a survivor.

"""
ROW = re.compile(r"^\| `(\S+)` \| +(\d+) \| +(\d+) \| +[\d.]+ % \|$", re.MULTILINE)
SECTION = re.compile(r"^## ([^\n]+)\n\n(.*?)```text\n(.*?)```$", re.MULTILINE | re.DOTALL)

Counts = dict[str, tuple[int, int]]
"""Mutants and survivors of a module."""


@dataclass(frozen=True)
class Mutant:
    """One change of one function."""

    name: str
    """What mutmut calls it: ``relskew_core._positions.skew.x_skew__mutmut_3``."""
    change: str
    """The lines that it takes away, an arrow, and those that it puts in their place."""
    place: int = 0
    """The number of the first such line in the mutated file, where the function is as it was."""
    span: tuple[int, int] = (0, 0)
    """The numbers of that function's first line and of the one after its last."""

    @property
    def module(self) -> str:
        """The module that it is in."""
        return self.name.rpartition(".")[0]

    @property
    def line(self) -> str:
        """Module, function and change, as the record shows them."""
        function = self.name.rpartition(".")[2].partition("__mutmut_")[0]
        return f"{self.module}.{function.removeprefix('x_').removeprefix('xǁ').replace('ǁ', '.')}: {self.change}"


def written(before: str, tried: Iterable[tuple[Mutant, str]]) -> str:
    """Bring the record of an earlier run up to date with what was tried now."""
    counts: Counts = {name: (int(all_), int(all_) - int(killed)) for name, all_, killed in ROW.findall(before)}
    now: dict[str, Counter[str]] = {}
    every: Counter[str] = Counter()
    for mutant, verdict in tried:
        every[mutant.module] += 1
        survivors = now.setdefault(mutant.module, Counter())
        if verdict in ("survived", "unreached"):
            survivors[mutant.line] += 1
    counts |= {name: (every[name], survivors.total()) for name, survivors in now.items()}
    left = sum(now.values(), Counter())
    text = HEAD + _table(counts)
    for reason, why, lines in [*SECTION.findall(before), (NEW, "", "")]:
        kept = []
        for line in lines.splitlines():
            tried_now = any(line.startswith(f"{name}.") for name in now)
            if not tried_now or left[line] > 0:
                kept.append(line)
                left[line] -= tried_now
        if reason == NEW:
            kept += sorted((+left).elements())
            left.clear()
        if kept:
            text += f"\n## {reason}\n\n{why}```text\n" + "".join(f"{line}\n" for line in kept) + "```\n"
    return text


def _table(counts: Counts) -> str:
    rows = "| module | mutants | killed | share |\n|---|---:|---:|---:|\n"
    whole = [sum(column) for column in zip(*counts.values(), strict=True)]
    for name, (all_, survivors) in [*((f"`{name}`", counts[name]) for name in sorted(counts)), ("all", whole)]:
        rows += f"| {name} | {all_} | {all_ - survivors} | {100 * (1 - survivors / max(all_, 1)):.1f} % |\n"
    return rows


def faults(text: str) -> list[str]:
    """Say what a record shows that must not be."""
    counts = [(int(all_), int(killed)) for _, all_, killed in ROW.findall(text)]
    share = sum(killed for _, killed in counts) / sum(all_ for all_, _ in counts)
    found = [f"{share:.1%} of the mutants are noticed; it must be {ENOUGH:.0%}"] if share < ENOUGH else []
    new = [line for reason, _, lines in SECTION.findall(text) if reason == NEW for line in lines.splitlines()]
    return found + ([f"{len(new)} survivors have no reason"] if new else [])


def recorded(path: Path) -> set[str]:
    """Return the lines of all survivors."""
    return {line for _, _, lines in SECTION.findall(path.read_text()) for line in lines.splitlines()}


def update(path: Path, tried: Iterable[tuple[Mutant, str]]) -> list[str]:
    """Write the record, and say what is wrong with it."""
    text = written(path.read_text() if path.exists() else "", tried)
    path.write_text(text)
    return faults(text)
