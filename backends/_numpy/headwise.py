"""NumPy: a head and a chunk at a time, in place, on threads that each run BLAS on one thread.

Everything that a chunk writes stays in the cache of one core; NumPy releases the interpreter in products and ufuncs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import array_api_compat.numpy as xp
import numpy as np

from relskew_core._array.softmax import NEGLIGIBLE
from relskew_core._kernel.call import Operands, Options
from relskew_core._kernel.chunk import Chunk, chunks, visible_columns
from relskew_core._kernel.forward import Tables
from relskew_core._positions.table import Table
from relskew_core.backends import _blas, _parallel
from relskew_core.backends._in_place import by_batch, chunk_size, fill, hidden_columns, regions

Array: TypeAlias = np.ndarray[Any, Any]

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
    idle = [_Scratch(call) for _ in range(workers)]  # memory that was written before costs no page faults

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


@dataclass(frozen=True, slots=True)
class HeadwiseCall:
    """The operands with their leading axes flattened to one batch axis, and what all chunks share."""

    q: Array
    k: Array
    v: Array
    rel_q: Array | None
    mask: Array | None
    tables: Tables
    options: Options
    chunks: list[Chunk]
    hidden: list[list[tuple[slice, Array]]]  # for each chunk, columns and which of their entries are hidden
    dead_rows: bool

    @classmethod
    def of(cls, operands: Operands, options: Options) -> HeadwiseCall:
        if options.chunk_size is None:
            options = replace(options, chunk_size=chunk_size(options, operands.q.itemsize))
        laid = [chunk for chunk in chunks(operands, options) if chunk.first < chunk.end]
        return cls(
            q=by_batch(operands.q, xp=xp),
            k=by_batch(operands.k, xp=xp),
            v=by_batch(operands.v, xp=xp),
            rel_q=None if operands.rel_q is None else by_batch(operands.rel_q, xp=xp),
            mask=None
            if operands.mask is None
            else by_batch(np.broadcast_to(operands.mask, (*operands.q.shape[:-1], operands.k.shape[-2])), xp=xp),
            tables=Tables.of(operands, options, laid, xp=xp),
            options=options,
            chunks=laid,
            hidden=[hidden_columns(options, chunk, xp=xp, device="cpu") for chunk in laid],
            dead_rows=operands.mask is not None or options.visibility.some_query_sees_nothing(),
        )


class _Scratch:
    """The buffers of one worker, as long as the longest chunk needs them, and every chunk's views of them."""

    def __init__(self, call: HeadwiseCall) -> None:
        size = max((chunk.width * (chunk.stop - chunk.start) for chunk in call.chunks), default=0)
        self._call = call
        self._relative = np.empty(size, call.q.dtype)
        self._absolute = np.empty(size, call.q.dtype)
        self._negligible = np.empty(size, bool)
        self._ones = np.ones(max((chunk.end - chunk.first for chunk in call.chunks), default=0), call.q.dtype)
        self._views: dict[int, _Views] = {}

    def views(self, index: int) -> _Views:
        """Return a chunk's views, made once for all heads."""
        if index not in self._views:
            chunk = self._call.chunks[index]
            n, m = chunk.stop - chunk.start, chunk.end - chunk.first
            relative = self._relative[: n * chunk.width].reshape(n, chunk.width)
            self._views[index] = _Views(
                chunk=chunk,
                relative=relative,
                moved=chunk.absolute(relative, xp=xp),
                logits=self._absolute[: n * m].reshape(n, m),
                negligible=self._negligible[: n * m].reshape(n, m),
                ones=self._ones[:m],
                hidden=self._call.hidden[index],
                n_hidden=sum(int(hidden.sum()) for _, hidden in self._call.hidden[index]),
            )
        return self._views[index]


@dataclass(frozen=True, slots=True)
class _Views:
    """Where a chunk works."""

    chunk: Chunk
    relative: Array  # relative layout, (n, width)
    moved: Array  # the same memory in absolute layout, (n, m)
    logits: Array  # (n, m)
    negligible: Array  # booleans, (n, m)
    ones: Array  # (m,)
    hidden: list[tuple[slice, Array]]
    n_hidden: int  # how many logits the pattern hides

    def hide(self, value: float) -> None:
        """Put ``value`` into the logits where the pattern hides a key from a query."""
        for columns, hidden in self.hidden:
            np.copyto(self.logits[:, columns], value, where=hidden)


def _attend(call: HeadwiseCall, views: _Views, batch: int, head: int, out: Array, lse: Array | None) -> None:
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
    _hide(call, batch, head, views)

    largest = logits.max(axis=-1, keepdims=True)
    if call.dead_rows:
        largest[largest == -math.inf] = 0.0
    total = _write_exponentials(views, largest)
    dead = total == 0.0
    if call.dead_rows:
        total[dead] = 1.0
    here = out[batch, head, queries]
    np.matmul(logits, call.v[batch, group, keys], out=here)
    if call.tables.rel_v is not None:
        views.hide(0.0)  # in relative layout a query's NaN would reach its neighbour's row
        relative[...] = 0.0
        views.moved[...] = logits
        seen, low, high = visible_columns(relative, chunk, call.options)
        if low <= high:
            extension = call.tables.rel_v.plan(low, high)
            rows = _of_table(call.tables.rel_v, head)[:, extension.start : extension.stop].T
            here += extension.fold(seen, xp=xp) @ rows
    here /= total
    if lse is not None:
        lse[batch, head, queries] = np.where(dead, -math.inf, largest + np.log(total))[:, 0]


def _write_exponentials(views: _Views, largest: Array) -> Array:
    """Write ``exp(logits - largest)`` over the logits, zeros for what is negligible, and return the rows' sums.

    No subnormal numbers are made on the way, which exp and products crawl through.
    """
    logits, negligible = views.logits, views.negligible
    logits -= largest
    np.less(logits, NEGLIGIBLE, out=negligible)
    count = np.count_nonzero(negligible)
    if 8 * count < negligible.size:
        if count != views.n_hidden:  # what the pattern hides is -inf already
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
    np.matmul(q, _of_table(call.tables.rel_k, head)[:, extension.start : extension.stop], out=core)
    fill(edges, zeros)
    if bias is not None:
        x += bias


def _of_table(table: Table, head: int) -> Array:
    columns: Array = table.columns
    return columns if columns.ndim == 2 else columns[head if columns.shape[0] > 1 else 0]


def _hide(call: HeadwiseCall, batch: int, head: int, views: _Views) -> None:
    """Add an additive mask, and put ``-inf`` where a query may not see."""
    views.hide(-math.inf)
    if call.mask is not None:
        chunk, logits = views.chunk, views.logits
        mask = call.mask[batch, head, chunk.start : chunk.stop, chunk.first : chunk.end]
        if mask.dtype == bool:
            np.copyto(logits, -math.inf, where=~mask)
        else:
            logits += mask
            np.copyto(logits, -math.inf, where=mask == -math.inf)  # where the products are not finite
