"""The record: how many mutants each module has, and those that no test notices, each under the reason why not.

A person moves a line of the last heading under another one, old or new; the command keeps it there for as long as the
mutant survives.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

NEW = "Not looked at"
SURVIVING = ("survived", "unreached")
ENOUGH = 0.95
HEAD = """\
# Mutants

`make mutants` changes one thing of the code at a time, and expects a test to fail. It writes this file.
[Contributing](../../CONTRIBUTING.md#mutants) says what to do with a survivor. A row has the counts of the last run of a
module, however much of it has been rewritten since.

"""
ROW = re.compile(r"^\| `(\S+)` \| +(\d+) \| +(\d+) \| +(\d+) \| +[\d.]+ % \|$", re.MULTILINE)
SAMPLE = re.compile(r"^\| (\w+) \| +(\d+) \| +(\d+) \| +(\d+) \| +(\d+) \|$", re.MULTILINE)
SECTION = re.compile(r"^## ([^\n]+)\n\n(.*?)```text\n(.*?)```$", re.MULTILINE | re.DOTALL)


class Count(NamedTuple):
    """The counts of a module; fewer mutants are tried than exist in a sample."""

    mutants: int
    tried: int
    killed: int


class Sample(NamedTuple):
    """The last sample of a suite: its seed, and what was noticed then."""

    seed: int
    mutants: int
    tried: int
    killed: int


@dataclass(frozen=True)
class Mutant:
    name: str  # what mutmut calls it: ``relskew_core._positions.skew.x_skew__mutmut_3``
    change: str  # the removed lines, an arrow, and the added lines
    place: int = 0  # the number of the first such line in the mutated file, where the function is as it was
    span: tuple[int, int] = (0, 0)  # the numbers of that function's first line and of the one after its last

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def function(self) -> str:
        """The name of the function, behind that of its class."""
        name = self.name.rpartition(".")[2].partition("__mutmut_")[0]
        return name.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")

    @property
    def line(self) -> str:
        """Module, function and change, as the record shows them."""
        return f"{self.module}.{self.function}: {self.change}"


def written(
    before: str, tried: Iterable[tuple[Mutant, str]], sizes: Mapping[str, int], *,
    samples: Mapping[str, Sample] | None = None, again: bool = False,
) -> str:  # fmt: skip
    """Bring the record of an earlier run up to date with what was tried now, of modules of these sizes.

    ``again``: only survivors were tried, and what was noticed is noticed still. A sample changes nothing about a module
    of which more was tried. ``samples`` are those of now, by the names of their suites.
    """
    counts = counted(before)
    known = {name: min(count.tried, sizes.get(name, 0)) for name, count in counts.items()}
    now, every = {name: Counter[str]() for name in sizes}, Counter[str]()
    for mutant, verdict in tried:
        every[mutant.module] += 1
        if verdict in SURVIVING:
            now[mutant.module][mutant.line] += 1
    for name, size in sizes.items():
        number = known.get(name, every[name]) if again else every[name]
        if number == 0 or number < known.get(name, 0):
            del now[name]
        else:
            counts[name] = Count(size, number, number - now[name].total())
    left = sum(now.values(), Counter[str]())
    text = HEAD + _table(counts) + _table_of_samples({**sampled(before), **(samples or {})})
    for reason, why, lines in [*SECTION.findall(before), (NEW, "", "")]:
        kept = []
        for line in lines.splitlines():
            tried_now = max((name for name in counts if line.startswith(f"{name}.")), key=len, default="") in now
            if not tried_now or left[line] > 0:
                kept.append(line)
                left[line] -= tried_now
        if reason == NEW:
            kept += sorted((+left).elements())
            left.clear()
        if kept:
            text += f"\n## {reason}\n\n{why}```text\n" + "".join(f"{line}\n" for line in kept) + "```\n"
    return text


def counted(text: str) -> dict[str, Count]:
    return {name: Count(*map(int, numbers)) for name, *numbers in ROW.findall(text)}


def sampled(text: str) -> dict[str, Sample]:
    return {name: Sample(*map(int, numbers)) for name, *numbers in SAMPLE.findall(text)}


def _table_of_samples(samples: Mapping[str, Sample]) -> str:
    if not samples:
        return ""
    rows = "\nThe last sample of each suite, and what was noticed before tests of its survivors came:\n\n"
    rows += "| suite | seed | mutants | tried | killed |\n|---|---:|---:|---:|---:|\n"
    return rows + "".join(f"| {name} | {' | '.join(map(str, samples[name]))} |\n" for name in sorted(samples))


def _table(counts: Mapping[str, Count]) -> str:
    rows = "| module | mutants | tried | killed | share |\n|---|---:|---:|---:|---:|\n"
    for name, count in [*((f"`{name}`", counts[name]) for name in sorted(counts)), ("all", _whole(counts))]:
        rows += f"| {name} | {count.mutants} | {count.tried} | {count.killed} | {100 * _share(count):.1f} % |\n"
    return rows


def _whole(counts: Mapping[str, Count]) -> Count:
    return Count(*map(sum, zip(*counts.values(), strict=True)))


def _share(count: Count) -> float:
    return count.killed / max(count.tried, 1)


def faults(text: str) -> list[str]:
    """Say what a record shows that must not be."""
    share = _share(_whole(counted(text)))
    found = [f"{share:.1%} of the mutants are noticed; it must be {ENOUGH:.0%}"] if share < ENOUGH else []
    new = [line for reason, _, lines in SECTION.findall(text) if reason == NEW for line in lines.splitlines()]
    return found + ([f"{len(new)} survivors have no reason"] if new else [])


def recorded(path: Path) -> set[str]:
    return {line for _, _, lines in SECTION.findall(path.read_text()) for line in lines.splitlines()}


def update(path: Path, tried: Iterable[tuple[Mutant, str]], sizes: Mapping[str, int], **kind: Any) -> list[str]:
    """Write the record, and return what is wrong with it; ``kind`` is the kind of run, as in :func:`written`."""
    text = written(path.read_text() if path.exists() else "", tried, sizes, **kind)
    path.write_text(text)
    return faults(text)
