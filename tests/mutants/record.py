"""A mutant, and the record of those that no test can notice, each under the reason why not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

SURVIVING = ("survived", "no tests")
SECTION = re.compile(r"^```text\n(.*?)```$", re.MULTILINE | re.DOTALL)


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


def recorded(text: str) -> Counter[str]:
    return Counter(line for lines in SECTION.findall(text) for line in lines.splitlines())


def compared(tried: Collection[tuple[Mutant, str]], known: Counter[str]) -> tuple[list[str], list[str]]:
    """Return the lines of survivors that the record lacks, and those of the record that a test notices now."""
    left = Counter(mutant.line for mutant, verdict in tried if verdict in SURVIVING)
    killed = Counter(mutant.line for mutant, verdict in tried if verdict not in SURVIVING)
    return sorted((left - known).elements()), sorted(((known - left) & killed).elements())
