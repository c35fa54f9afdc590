"""The calls of ``dense.CASES`` that kernels serve which know some arrays and options."""

import dense
from relskew_core._kernel.call import Arguments, unsupported
from relskew_core._kernel.problem import problem


def served(supported: frozenset[str]) -> list[dense.Case]:
    found = []
    for case in dense.CASES:
        call = problem(Arguments(**case.arrays(), **case.call()))
        if call.ragged is None and not unsupported(call.given, call.options, supported):
            found.append(case)
    return found
