"""NumPy: a head and a chunk at a time, in place, on threads that each run BLAS on one thread.

Everything that a chunk writes stays in the cache of one core; NumPy releases the interpreter in products and ufuncs.
"""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from relskew_core._array.softmax import NEGLIGIBLE
from relskew_core._kernel.call import Operands, Options
from relskew_core._kernel.chunk import Chunk, visible_columns
from relskew_core.backends import _blas, _parallel
from relskew_core.backends._in_place import fill, regions
from relskew_core.backends._numpy.call import Array, HeadwiseCall
from relskew_core.backends._numpy.scratch import Hidden, Scratch, Views

SHORT = 2**13
"""Logits of a head up to which Python's work for each head costs more than the caches and threads save."""


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Array, Array | None]:
    """Return the output (..., H, Lq, Dv) and, if asked for, the log-sum-exp (..., H, Lq)."""
    call = HeadwiseCall.of(operands, options)
    shape = call.q.shape[:-1]
    out = np.zeros((*shape, call.v.shape[-1]), call.q.dtype)
    lse = np.full(shape, -math.inf, call.q.dtype) if options.return_lse else None
    heads = [(batch, head) for batch in range(shape[0]) for head in range(shape[1])]
    workers = _parallel.numpy_threads()
    parts = 1 if len(heads) >= workers else workers  # few heads: their chunks are dealt to the workers
    idle = [Scratch(call) for _ in range(workers)]

    def work(task: tuple[int, int, int]) -> None:
        batch, head, part = task
        scratch = idle.pop()
        with np.errstate(invalid="ignore", over="ignore"):  # hidden products may be anything
            for index in range(part, len(call.chunks), parts):
                _parallel.leave_if_dropped()
                _attend(call, scratch.views(index), batch, head, out, lse)
        idle.append(scratch)

    with _parallel.blas_on_one_thread():
        _parallel.for_each(
            work, [(*pair, part) for pair in heads for part in range(parts)],
            workers=workers, library="numpy", initializer=_blas.limit_this_thread,
        )  # fmt: skip
    lead = operands.q.shape[:-3]
    return out.reshape(*lead, *out.shape[1:]), None if lse is None else lse.reshape(*lead, *lse.shape[1:])


def _attend(call: HeadwiseCall, views: Views, batch: int, head: int, out: Array, lse: Array | None) -> None:
    chunk, relative, logits = views.chunk, views.relative, views.logits
    group = head * call.k.shape[1] // call.q.shape[1]
    queries, keys = slice(chunk.start, chunk.stop), slice(chunk.first, chunk.end)
    q = call.q[batch, head, queries] * call.options.scale
    np.matmul(q, call.k[batch, group, keys].T, out=logits)
    if call.tables.rel_k is not None or call.tables.rel_bias is not None:
        _write_relative(call, batch, head, chunk, q, relative)
        logits += views.moved
    if call.options.softcap is not None:
        logits *= 1 / call.options.softcap
        np.tanh(logits, out=logits)
        logits *= call.options.softcap
    hidden = views.hidden(call, batch)
    _hide(call, batch, head, views, hidden)

    largest = logits.max(axis=-1, keepdims=True)
    if call.dead_rows:
        largest[largest == -math.inf] = 0.0
    total = _write_exponentials(views, largest, hidden.count)
    dead = total == 0.0
    if call.dead_rows:
        total[dead] = 1.0
    views.drop(call, batch, head)
    here, v = out[batch, head, queries], call.v[batch, group, keys]
    np.matmul(logits, v if hidden.unseen is None else np.where(hidden.unseen[:, None], 0, v), out=here)
    if call.tables.rel_v is not None:
        hidden.put(0.0, logits)  # in relative layout a query's NaN would reach its neighbour's row
        relative[...] = 0.0
        views.moved[...] = logits
        seen, low, high = visible_columns(relative, chunk, call.options)
        if low <= high:
            extension = call.tables.rel_v.plan(low, high)
            rows = call.of_table(call.tables.rel_v, head)[:, extension.start : extension.stop].T
            here += extension.fold(seen, xp=xp) @ rows
    here /= total if call.drawn is None else total * (1 - call.options.dropout)
    if lse is not None:
        lse[batch, head, queries] = np.where(dead, -math.inf, largest + np.log(total))[:, 0]


def _write_exponentials(views: Views, largest: Array, n_hidden: int) -> Array:
    """Write ``exp(logits - largest)`` over the logits, zeros for what is negligible, and return the rows' sums.

    No subnormal numbers are made on the way, which exp and products crawl through.
    """
    logits, negligible = views.logits, views.negligible
    logits -= largest
    np.less(logits, NEGLIGIBLE, out=negligible)
    count = np.count_nonzero(negligible)
    if 8 * count < negligible.size:
        if count != n_hidden:  # what is hidden is -inf already
            np.copyto(logits, -math.inf, where=negligible)
        np.exp(logits, out=logits)
    else:  # scattered all over peaky logits, where a masked copy takes longer than a product
        np.maximum(logits, NEGLIGIBLE, out=logits)
        np.exp(logits, out=logits)
        np.logical_not(negligible, out=negligible)
        logits *= negligible
    return (logits @ views.ones)[:, None]  # BLAS takes a third of the time of a sum along rows


def _write_relative(call: HeadwiseCall, batch: int, head: int, chunk: Chunk, scaled: Array, x: Array) -> None:
    """Write everything that depends on the relative position alone into ``x``, (n, width)."""
    bias = None
    if call.tables.rel_bias is not None:
        spread = call.tables.rel_bias.spread(chunk.low, chunk.high, xp=xp)
        bias = spread[head if spread.shape[0] > 1 else 0]
    if call.tables.rel_k is None:
        x[...] = bias
        return
    q = scaled
    if call.rel_q is not None or call.options.rel_scale != call.options.scale:
        rel_q = call.q if call.rel_q is None else call.rel_q
        q = rel_q[batch, head, chunk.start : chunk.stop] * call.options.rel_scale
    extension = call.tables.rel_k.plan(chunk.low, chunk.high)
    core, edges, zeros = regions(extension, x)
    np.matmul(q, call.of_table(call.tables.rel_k, head)[:, extension.start : extension.stop], out=core)
    fill(edges, zeros)
    if bias is not None:
        x += bias


def _hide(call: HeadwiseCall, batch: int, head: int, views: Views, hidden: Hidden) -> None:
    """Add an additive mask, and put ``-inf`` where a query may not see."""
    hidden.put(-math.inf, views.logits)
    if call.mask is not None:
        chunk, logits = views.chunk, views.logits
        mask = call.mask[batch, head, chunk.start : chunk.stop, chunk.first : chunk.end]
        if mask.dtype == bool:
            np.copyto(logits, -math.inf, where=~mask)
        else:
            logits += mask
            np.copyto(logits, -math.inf, where=mask == -math.inf)  # where the products are not finite
