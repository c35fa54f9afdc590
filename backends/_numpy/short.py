"""NumPy: short calls, all heads and queries at once, in place and in few operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from types import NoneType
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from relskew_core._array.softmax import NEGLIGIBLE
from relskew_core._kernel.call import Operands
from relskew_core._kernel.forward import grouped_matmul
from relskew_core._kernel.plan import Plan
from relskew_core.backends._compiled import Call
from relskew_core.backends._numpy import compiled as kernels
from relskew_core.backends._numpy.call import Array

TYPES = frozenset((np.ndarray, NoneType))
"""Of arguments; subclasses have ways of their own."""

LOGITS = 2**14
"""Logits of a head up to which this is the faster way: of more, the caches and threads of heads save more."""

SCRATCH = 2**18
"""Logits of the items that are worked on at once: in the caches, and few enough for memory."""

ONLY_COMPILED = False
"""Whether compiled kernels are all that there is here for short calls."""


def ordinary() -> bool:
    """Whether nobody traces, watches or changes what is computed here."""
    return True


about = attrgetter("dtype")
"""What a call's checks look at in an array, its shape aside."""


def serves(x: Operands) -> bool:
    """Whether these kernels are for such arrays."""
    return True


compiled = kernels.call_of
"""What compiled kernels are to know of a call, ``None`` if they do not serve it."""


def rows(wanted: Sequence[int]) -> Array:
    """Return which rows of a table are wanted, as an array."""
    return np.asarray(wanted)


def hidden(seen: Array, *_: Any) -> Array:
    """Return which keys the pattern hides from queries, (n, m)."""
    return ~seen


def is_short(shape: Sequence[int], keys: int) -> bool:
    """Whether this is the faster way, and memory stays small, for queries of a shape. One has no chunks to cut."""
    heads, queries = shape[-3] if len(shape) > 2 else 1, shape[-2]
    items = math.prod(shape[:-3]) if len(shape) != 4 else 1  # of which blocks are made
    return items * heads * queries * keys <= 4 * SCRATCH and (queries == 1 or queries * keys <= LOGITS)


def takes(x: Operands, plan: Plan | Call) -> bool:
    """Whether a call of such a plan is for these kernels."""
    return True


def attention(x: Operands, plan: Plan | Call) -> tuple[Array, Array | None]:
    """Return the output (..., H, Lq, Dv) and, if asked for, the log-sum-exp (..., H, Lq)."""
    if isinstance(plan, Call):
        return kernels.attend(x, plan)
    if x.q.shape[-2] == 1 and plan.is_plain:
        return _attend_one(x, plan), None
    logits = x.q[..., 0].size * (plan.layout.end - plan.layout.first)
    if x.q.ndim != 4 or logits <= SCRATCH:
        return _quietly(x, plan)
    size = max(1, SCRATCH * len(x.q) // logits)
    found = [
        _quietly(Operands(*(each if each is None or each.ndim < 4 or len(each) == 1 else each[start : start + size]
                            for each in x)), plan)
        for start in range(0, len(x.q), size)
    ]  # fmt: skip
    out, lse = (None if each[0] is None else np.concatenate(each) for each in zip(*found, strict=True))
    assert out is not None
    return out, lse


def _attend_one(x: Operands, plan: Plan) -> Array:
    """Return the output of one query for each head, where there is nothing but a table."""
    q, k, v, rel_k, *_ = x
    assert rel_k is not None
    first, end, width, row, _ = plan.layout
    if width < k.shape[-2]:
        k, v = k[..., first:end, :], v[..., first:end, :]
    scaled = q * plan.options.scale
    if rel_k.ndim == 2:
        relative = scaled.reshape(-1, q.shape[-1]) @ rel_k[row : row + width].T
    else:
        relative = scaled @ rel_k[:, row : row + width].swapaxes(-1, -2)
    logits: Array = grouped_matmul(scaled, k.swapaxes(-1, -2), xp=np)
    logits += relative.reshape(logits.shape)
    logits -= np.maximum.reduce(logits, axis=-1, keepdims=True)
    if np.minimum.reduce(logits, axis=None) < NEGLIGIBLE:
        np.copyto(logits, -math.inf, where=logits < NEGLIGIBLE)
    weights = np.exp(logits, out=logits)
    out: Array = grouped_matmul(weights, v, xp=np)
    out /= np.add.reduce(weights, axis=-1, keepdims=True)
    return out


def _quietly(x: Operands, plan: Plan) -> tuple[Array, Array | None]:
    if plan.hidden is None and x.mask is None:
        return _attend(x, plan)
    with np.errstate(invalid="ignore", over="ignore"):  # hidden products may be anything
        return _attend(x, plan)


def _attend(x: Operands, plan: Plan) -> tuple[Array, Array | None]:
    options, (first, end, *_) = plan.options, plan.layout
    scaled, k, v = x.q * options.scale, x.k[..., first:end, :], x.v[..., first:end, :]
    logits = grouped_matmul(scaled, k.swapaxes(-1, -2), xp=xp)
    relative = _relative_terms(x, scaled, plan)
    if relative is not None:
        logits += _skewed(relative, plan)
    if options.softcap is not None:
        logits *= 1 / options.softcap
        np.tanh(logits, out=logits)
        logits *= options.softcap
    _hide(x.mask, logits, plan)
    largest = logits.max(axis=-1, keepdims=True)
    dead = None
    if plan.dead_rows or x.mask is not None:
        dead = largest == -math.inf
        largest[dead] = 0.0
    logits -= largest
    np.copyto(logits, -math.inf, where=logits < NEGLIGIBLE)  # no subnormals
    weights = np.exp(logits, out=logits)
    total = weights.sum(axis=-1, keepdims=True)
    if dead is not None:
        total[dead] = 1.0
    weights /= total
    out: Array = grouped_matmul(weights, v, xp=xp)
    if x.rel_v is not None:
        seen = plan.layout.seen
        out += _unskewed(weights, plan)[..., seen] @ _rows(x.rel_v, plan)[..., seen, :]
    if not options.return_lse:
        return out, None
    lse = largest + np.log(total)
    if dead is not None:
        lse[dead] = -math.inf
    return out, lse[..., 0]


def _relative_terms(x: Operands, scaled: Array, plan: Plan) -> Array | None:
    """Return what depends on the relative position alone, in relative layout (…, n, width)."""
    bias = None if x.rel_bias is None else _rows(x.rel_bias[..., None], plan).swapaxes(-1, -2)
    if x.rel_k is None:
        return None if bias is None else np.repeat(bias, x.q.shape[-2], axis=-2)
    met = scaled
    if x.rel_q is not None or plan.options.rel_scale != plan.options.scale:
        met = (x.q if x.rel_q is None else x.rel_q) * plan.options.rel_scale
    if plan.rows is None or 2 * x.rel_k.shape[-2] > plan.layout.width:
        product = met @ _rows(x.rel_k, plan).swapaxes(-1, -2)
    else:  # of a short table it costs less to multiply what is there
        product = _extended(met @ x.rel_k.swapaxes(-1, -2), plan, -1)
    return product if bias is None else product + bias


def _rows(table: Array, plan: Plan) -> Array:
    """Return the rows of a table that the columns of the relative layout stand for."""
    if plan.rows is None:
        return table[..., plan.layout.row : plan.layout.row + plan.layout.width, :]
    return _extended(table, plan, -2)


def _extended(x: Array, plan: Plan, axis: int) -> Array:
    assert plan.rows is not None
    if plan.options.span.beyond == "zero":
        x = np.concatenate([x, np.zeros_like(x.take([0], axis=axis))], axis=axis)
    return x.take(plan.rows, axis=axis)


def _skewed(x: Array, plan: Plan) -> Array:
    """Relative layout (…, n, width) to absolute layout (…, n, m), as a view."""
    n, width = x.shape[-2:]
    if n == 1:
        return x
    x, keys = np.ascontiguousarray(x), plan.layout.end - plan.layout.first
    strides = (*x.strides[:-2], (width - 1) * x.itemsize, x.itemsize)
    return np.ndarray((*x.shape[:-1], keys), x.dtype, x, (n - 1) * x.itemsize, strides)


def _unskewed(s: Array, plan: Plan) -> Array:
    """Absolute layout (…, n, m) to relative layout (…, n, width)."""
    if plan.hidden is not None:  # a query's NaN would be its neighbour's
        np.copyto(s, 0.0, where=plan.hidden)
    width = plan.layout.width + 1  # one more than there are, or the rows of the view would overlap
    x = np.zeros((*s.shape[:-1], width), s.dtype)
    strides = (*x.strides[:-2], (width - 1) * x.itemsize, x.itemsize)
    np.ndarray(s.shape, x.dtype, x, (s.shape[-2] - 1) * x.itemsize, strides)[...] = s
    return x[..., :-1]


def _hide(mask: Array | None, logits: Array, plan: Plan) -> None:
    """Add an additive mask, and put ``-inf`` where a query may not see."""
    if plan.hidden is not None:
        np.copyto(logits, -math.inf, where=plan.hidden)
    if mask is None:
        return
    mask = mask if mask.shape[-1] == 1 else mask[..., plan.layout.first : plan.layout.end]
    if mask.dtype == bool:
        np.copyto(logits, -math.inf, where=~mask)
    else:
        logits += mask
        np.copyto(logits, -math.inf, where=mask == -math.inf)
