"""NumPy: the kernels that were compiled at installation."""

from __future__ import annotations

from functools import partial

from relskew_core._kernel.problem import Problem
from relskew_core._positions.ragged import RaggedVisibility
from relskew_core.backends import _compiled, _ragged
from relskew_core.backends._numpy import prepared as prepared
from relskew_core.backends._numpy.compiled import attention, attention_vjp
from relskew_core.backends._path import Path


def serve(function: str, call: Problem) -> Path | str:
    x, options, half = call.given, call.options, call.is_final
    if not isinstance(options.visibility, RaggedVisibility):
        reason = _compiled.refusal(x, options)
        return reason or Path(attention, attention_vjp, supports=_compiled.SUPPORTED, half=half)
    reason = _ragged.refusal(options) or _compiled.refusal(x, options, _ragged.SUPPORTED)
    return reason or Path(
        partial(_ragged.attention, attend=attention, split=_ragged.slices),
        partial(_ragged.attention_vjp, pull_back=attention_vjp, split=_ragged.slices),
        supports=_ragged.SUPPORTED,
        half=half,
    )
