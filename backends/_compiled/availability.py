"""The message whether there are compiled kernels, and for which processors; and a warning if they are missing."""

from __future__ import annotations

import functools
import importlib
import math
import os
import platform

from relskew_core._array.extras import compile_line, warn_caller, where_to_run
from relskew_core._array.namespace import is_compiling, on_cpu
from relskew_core._kernel.call import Operands
from relskew_core.backends import _compiled
from relskew_core.backends._compiled.call import NOT_LOADED

LONG = 2**28
"""The multiplications of queries with keys, including hidden ones, that take tenths of a second without kernels."""

TO_COMPILE = f"`{compile_line()}`{where_to_run()} compiles them"


def availability() -> str:
    """Return the processors for which the kernels are compiled, or why there are none and what to do."""
    try:
        kernels = importlib.import_module("relskew_core.backends._compiled._kernels")
    except ModuleNotFoundError:
        return (
            "none: no C++ compiler served at installation, or relskew was made without them "
            f"(RELSKEW_PURE=1, a wheel for every platform); with a compiler, {TO_COMPILE}"
        )
    except NOT_LOADED as error:
        return f"none: what was compiled at installation cannot be loaded: {error}; with a compiler, {TO_COMPILE} anew"
    level = kernels.LEVELS[-1]
    own = getattr(kernels, "PROCESSOR", level)  # older modules have none
    found = f"for {f'any {platform.machine()}' if level == 'base' else level}, every floating dtype on CPUs"
    return found if level == own else f"{found}; not for this processor, {own}: {TO_COMPILE} for it"


def warn_of_long_calls(x: Operands) -> None:
    """Warn once about a long call on a CPU without kernels, unless ``RELSKEW_PURE=1`` asks for none."""
    if _compiled.kernels is not None or is_compiling() or os.environ.get("RELSKEW_PURE") == "1":
        return
    lengths = (*x.q.shape, x.k.shape[-2])
    # traced lengths have no value
    is_long = all(isinstance(length, int) for length in lengths) and math.prod(lengths) >= LONG
    if is_long and on_cpu(x.q):
        _warn()


@functools.cache
def _warn() -> None:
    warn_caller(
        "long calls on CPUs take several times as long without the compiled kernels. Compiled kernels: "
        f"{availability()}. Set RELSKEW_PURE=1 to silence this warning",
        RuntimeWarning,
    )
