"""NumPy: calls that are checked once for all equal calls."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from types import NoneType

import numpy as np

from relskew_core._kernel.call import Operands, Options
from relskew_core.backends import _compiled
from relskew_core.backends._compiled import Call
from relskew_core.backends._numpy import compiled

TYPES = frozenset((np.ndarray, NoneType))
"""The types of arguments; subclasses may behave differently."""

HALF = True
"""Whether the kernels accept half precision."""


def ordinary() -> bool:
    return True


about = attrgetter("dtype")
"""The properties of an array that a call's checks depend on, except for its shape."""


attend = partial(compiled.attend, summed=True)
"""Return the output (..., H, Lq, Dv) and, if requested, the log-sum-exp (..., H, Lq)."""


def call_of(x: Operands, options: Options) -> Call | None:
    return compiled.call_of(x, options) if _compiled.serves(x, options) else None
