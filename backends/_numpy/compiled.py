"""NumPy: calls by the kernels that were compiled at installation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from relskew_core._array.namespace import namespace_of
from relskew_core._array.precision import wide
from relskew_core._kernel.call import Gradients, Operands, Options, shape_of_out, shape_of_rows, shape_of_sums
from relskew_core.backends import _compiled, _threads
from relskew_core.backends._compiled import Call, Library
from relskew_core.backends._ragged import by_batch, flattened

Array: TypeAlias = np.ndarray[Any, Any]


def call_of(operands: Operands, options: Options) -> Call:
    return Call.of(flattened(operands, xp=xp), options)


def attention(
    operands: Operands, options: Options, library: Library | None = None, **_: Any
) -> tuple[Array, Array | None]:
    """Return the output (..., H, Lq, Dv) and, if requested, the sums of weights (..., H, Lq, 2)."""
    return attend(operands, call_of(operands, options), library)


def attend(
    operands: Operands, call: Call, library: Library | None = None, *, summed: bool = False
) -> tuple[Array, Array | None]:
    """Return the same for a prepared call, or the log-sum-exp (..., H, Lq) if the sums are to be ``summed``."""
    x, library = flattened(operands, xp=xp), NUMPY if library is None else library
    out, own = library.empty(shape_of_out(x), dtype=x.q.dtype), None
    shape_of_own = shape_of_rows if summed else shape_of_sums
    if call.options.return_lse:
        own = library.empty(shape_of_own(x), dtype=wide(x.q.dtype, xp=xp))
    _compiled.attend(x, call, out, *((own, None) if summed else (None, own)), library=library)
    if operands.q.ndim == 4:
        return out, own
    return out.reshape(shape_of_out(operands)), None if own is None else own.reshape(shape_of_own(operands))


def attention_vjp(
    d_out: Array,
    operands: Operands,
    options: Options,
    *,
    out: Array | None = None,
    sums: Array | None = None,
    d_lse: Array | None = None,
    library: Library | None = None,
    **_: Any,
) -> Gradients:
    x, wanted = flattened(operands, xp=xp), replace(options, return_lse=True)
    out, sums = _compiled.results(out, sums, partial(attention, operands, wanted), xp=xp)
    d_out, out, sums = (by_batch(each, xp=xp) for each in (d_out, out, sums))
    d_lse = None if d_lse is None else d_lse.reshape(shape_of_rows(x))
    library = NUMPY if library is None else library
    found = _compiled.pull_back(d_out, x, Call.of(x, options), out, sums, d_lse, library=library)
    return Gradients(**_compiled.of_call(found, operands, xp=xp))


def _in_rows(x: Array | None) -> Array | None:
    """Return an array that is contiguous along its last axis and aligned."""
    if x is None or (x.flags.aligned and (x.strides[-1] == x.itemsize or x.shape[-1] == 1)):
        return x
    return x.copy()


xp = namespace_of(np)
NUMPY = _compiled.Library(xp, iter, _in_rows, np.empty, np.zeros, _threads.numpy_threads)
