"""NumPy: the forward pass, a head and a chunk at a time, in place, on threads that each run BLAS on one thread.

Everything that a chunk writes stays in the cache of one core; NumPy releases the interpreter in products and ufuncs.
"""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from relskew_core._kernel.call import Operands, Options
from relskew_core._kernel.chunk import visible_columns
from relskew_core.backends import _blas, _parallel
from relskew_core.backends._numpy import compiled
from relskew_core.backends._numpy.call import Array, HeadwiseCall
from relskew_core.backends._numpy.logits import write_exponentials, write_logits
from relskew_core.backends._numpy.scratch import Scratch, Views

SHORT = 2**13
"""Logits of a head up to which Python's work for each head costs more than the caches and threads save."""


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Array, Array | None]:
    """Return the output (..., H, Lq, Dv) and, if asked for, the log-sum-exp (..., H, Lq)."""
    if compiled.serves(operands, options):
        return compiled.attention(operands, options)
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
    hidden = write_logits(call, views, batch, head)

    largest, total = write_exponentials(call, views, hidden)
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
