"""The calls of ``dense.CASES`` that kernels serve which know some arrays and options."""

from __future__ import annotations

import dense
from relskew_core._kernel.call import Arguments, unknown
from relskew_core._kernel.problem import problem


def served(knows: frozenset[str]) -> list[dense.Case]:
    """Return the cases in which nothing is unknown."""
    found = []
    for case in dense.CASES:
        call = problem(Arguments(**case.arrays(), **case.call()))
        if not unknown(call.given, call.options, knows):
            found.append(case)
    return found
