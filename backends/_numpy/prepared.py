"""NumPy: calls that are checked once for all that are alike."""

from __future__ import annotations

from operator import attrgetter
from types import NoneType

import numpy as np

from relskew_core._kernel.call import Operands, Options
from relskew_core.backends import _compiled
from relskew_core.backends._compiled import Call
from relskew_core.backends._numpy import compiled
from relskew_core.backends._numpy.compiled import attend as attend

TYPES = frozenset((np.ndarray, NoneType))
"""Of arguments; subclasses have ways of their own."""

HALF = True
"""Whether the kernels get half precision as it is."""


def ordinary() -> bool:
    """Whether nothing traces, records or changes what is computed here."""
    return True


about = attrgetter("dtype")
"""What a call's checks look at in an array, its shape aside."""


def call_of(x: Operands, options: Options) -> Call | None:
    """Return the description of a call for the compiled kernels, ``None`` if they do not serve it."""
    return compiled.call_of(x, options) if _compiled.serves(x, options) else None
