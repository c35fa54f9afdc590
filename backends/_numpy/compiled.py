"""NumPy: calls of float32 by the kernels that were compiled at installation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import array_api_compat.numpy as xp
import numpy as np

from relskew_core._array.softmax import share_of
from relskew_core._kernel.call import Gradients, Operands, Options
from relskew_core._kernel.plan import Layout
from relskew_core.backends import _compiled, _parallel
from relskew_core.backends._in_place import by_batch, mask_by_batch
from relskew_core.backends._numpy.call import Array


def serves(x: Operands, options: Options) -> bool:
    """Whether the kernels take a call."""
    return x.q.dtype == np.float32 and _compiled.serves(x, options)


def serves_backward(x: Operands, options: Options) -> bool:
    """Whether the kernels take a call's backward pass, which gives no gradient of a mask."""
    return serves(x, options) and (x.mask is None or x.mask.dtype == bool)


def attention(operands: Operands, options: Options, layout: Layout | None = None) -> tuple[Array, Array | None]:
    """Return the output (..., H, Lq, Dv) and, if asked for, the log-sum-exp (..., H, Lq); for one query by a layout."""
    x = _flattened(operands)
    out = np.empty((*x.q.shape[:-1], x.v.shape[-1]), np.float32)
    lse = np.empty(out.shape[:-1], np.float32) if options.return_lse else None
    _compiled.attend(x, options, layout, out, lse, library=NUMPY)
    if operands.q.ndim == 4:
        return out, lse
    rows = operands.q.shape[:-1]
    return out.reshape(*rows, -1), None if lse is None else lse.reshape(rows)


def attention_vjp(
    d_out: Array, operands: Operands, options: Options, out: Array | None, lse: Array | None, d_lse: Array | None
) -> Gradients:
    """Return the gradients of every operand."""
    if out is None or lse is None:
        own, own_lse = attention(operands, replace(options, return_lse=True))
        assert own_lse is not None
        if out is None:
            out = own if lse is None else own * share_of(own_lse, lse, xp=xp)[..., None]
        lse = own_lse if lse is None else lse
    x = _flattened(operands)
    rows = x.q.shape[:-1]
    found = _compiled.pull_back(
        _in_rows(by_batch(d_out, xp=xp)),
        x,
        options,
        _in_rows(by_batch(out, xp=xp)),
        lse.reshape(rows),
        None if d_lse is None else d_lse.reshape(rows),
        library=NUMPY,
    )
    return Gradients(**{name: array.reshape(getattr(operands, name).shape) for name, array in found.items()})


def _flattened(operands: Operands) -> Operands:
    """Return a call with one batch axis."""
    if operands.q.ndim == 4 and operands.mask is None:
        return operands
    found = {name: by_batch(getattr(operands, name), xp=xp) for name in ("q", "k", "v")}
    if operands.rel_q is not None:
        found["rel_q"] = by_batch(operands.rel_q, xp=xp)
    if operands.mask is not None:
        found["mask"] = mask_by_batch(operands.mask, operands.q, xp=xp)
    return operands._replace(**found)


def _in_rows(x: Array) -> Array:
    """Return an array whose rows are in one piece."""
    return x if x.strides[-1] == x.itemsize or x.shape[-1] == 1 else np.ascontiguousarray(x)


NUMPY = _compiled.Library(
    xp,
    _in_rows,
    partial(np.empty, dtype=np.float32),
    partial(np.zeros, dtype=np.float32),
    partial(_parallel.numpy_threads, blas=False),
)
