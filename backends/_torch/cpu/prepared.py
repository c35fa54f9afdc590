"""torch on CPU: calls that are checked once for all equal calls."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from types import NoneType

import torch

from relskew_core._kernel.call import Operands, Options
from relskew_core.backends import _compiled
from relskew_core.backends._compiled import Call
from relskew_core.backends._torch import transformations
from relskew_core.backends._torch.cpu import compiled, eager

TYPES = frozenset((*transformations.TYPES, NoneType))
"""The types of arguments; subclasses may behave differently."""

HALF = True
"""Whether the kernels accept half precision."""

ordinary = transformations.is_ordinary

about = attrgetter("dtype", "device", "layout")
"""The properties of a tensor that a call's checks depend on, except for its shape."""


attend = partial(eager.attend, summed=True)
"""Return the output (..., H, Lq, Dv) and, if requested, the log-sum-exp (..., H, Lq)."""


def call_of(x: Operands, options: Options) -> Call | None:
    if x.q.device.type != "cpu" or any(each is not None and each.layout != torch.strided for each in x):
        return None
    return compiled.call_of(x, options) if _compiled.serves(x, options) else None
