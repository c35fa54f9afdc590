"""NumPy: the backward pass, a head and a chunk at a time, in place and on threads as the forward pass.

Gradients of logits are written in absolute layout and moved to relative layout once, where the products with the
tables wait for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from relskew_core._kernel.call import TABLES, Gradients, Operands, Options
from relskew_core._kernel.chunk import visible_columns
from relskew_core._kernel.sums import sum_to
from relskew_core._positions.table import Table
from relskew_core.backends import _blas, _parallel
from relskew_core.backends._in_place import by_batch, mask_by_batch
from relskew_core.backends._numpy import compiled
from relskew_core.backends._numpy.call import Array, HeadwiseCall
from relskew_core.backends._numpy.logits import write_exponentials, write_logits
from relskew_core.backends._numpy.scratch import Scratch, Views


def attention_vjp(
    d_out: Array,
    operands: Operands,
    options: Options,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    d_lse: Array | None = None,
    xp: Any,
) -> Gradients:
    """Return the gradients of every operand; repeatable to the bit for a given number of threads."""
    if compiled.serves_backward(operands, options):
        return compiled.attention_vjp(d_out, operands, options, out, lse, d_lse)
    call = HeadwiseCall.of(operands, options)
    whole = _Whole.of(call, d_out, out, lse, d_lse)
    groups = [(batch, group) for batch in range(call.k.shape[0]) for group in range(call.k.shape[1])]
    workers = max(1, min(_parallel.numpy_threads(), len(groups)))
    bounds = [len(groups) * index // workers for index in range(workers + 1)]
    # Every worker owns a fixed run of key heads and its own sums for what they share: no two write one place.
    sums = [_Sums.of(call, operands) for _ in range(workers)]

    def work(index: int) -> None:
        scratch, of_group = Scratch(call), call.q.shape[1] // call.k.shape[1]
        with np.errstate(invalid="ignore", over="ignore"):  # hidden products may be anything
            for batch, group in groups[bounds[index] : bounds[index + 1]]:
                for head in range(group * of_group, (group + 1) * of_group):
                    for number in range(len(call.chunks)):
                        _parallel.leave_if_dropped()
                        _pull_back(call, scratch, number, batch, head, whole, sums[index])

    with _parallel.blas_on_one_thread():
        _parallel.for_each(work, range(workers), workers=workers, library="numpy", initializer=_blas.limit_this_thread)
    return _gradients(call, operands, whole, sums)


@dataclass(frozen=True, slots=True)
class _Whole:
    """The incoming gradients, and the outgoing ones that belong to heads of one batch entry."""

    d_out: Array
    delta: Array | None  # mean of the weights' gradients by weight, known from the output (B, H, Lq)
    lse: Array | None
    d_lse: Array | None
    q: Array
    k: Array
    v: Array
    rel_q: Array  # of the queries that meet the table: `q`'s where they are the same

    @classmethod
    def of(cls, call: HeadwiseCall, d_out: Array, out: Array | None, lse: Array | None, d_lse: Array | None) -> _Whole:
        """Take what came, and zeros for what goes."""

        def rows(x: Array | None) -> Array | None:
            return None if x is None else x.reshape(call.q.shape[:-1])

        q, k, v = (np.zeros(x.shape, x.dtype) for x in (call.q, call.k, call.v))
        return cls(
            d_out=by_batch(d_out, xp=xp),
            delta=rows(None if out is None else np.einsum("...d,...d->...", d_out, out)),
            lse=rows(lse),
            d_lse=rows(d_lse),
            q=q,
            k=k,
            v=v,
            rel_q=q if call.rel_q is None else np.zeros(call.rel_q.shape, call.rel_q.dtype),
        )


@dataclass(frozen=True, slots=True)
class _Sums:
    """One worker's sums of what heads and batch entries share: tables by rows, and an additive mask."""

    rel_k: Array | None  # (1 or H, rows, D)
    rel_v: Array | None
    rel_bias: Array | None
    mask: Array | None  # four axes, each whole or 1

    @classmethod
    def of(cls, call: HeadwiseCall, operands: Operands) -> _Sums:
        def rows(table: Table | None) -> Array | None:
            if table is None:
                return None
            *heads, dim, count = table.columns.shape
            return np.zeros((*(heads or [1]), count, dim), call.q.dtype)

        mask = operands.mask
        return cls(
            rows(call.tables.rel_k),
            rows(call.tables.rel_v),
            rows(call.tables.rel_bias),
            None if mask is None or mask.dtype == bool else np.zeros_like(mask_by_batch(mask, operands.q, xp=xp)),
        )


def _pull_back(
    call: HeadwiseCall, scratch: Scratch, number: int, batch: int, head: int, whole: _Whole, sums: _Sums
) -> None:
    """Add one chunk's gradients."""
    views, options = scratch.views(number), call.options
    chunk, weights = views.chunk, views.logits  # the logits become the weights
    group = head * call.k.shape[1] // call.q.shape[1]
    queries, keys = slice(chunk.start, chunk.stop), slice(chunk.first, chunk.end)
    slope = None if options.softcap is None else scratch.absolute("slope", chunk)

    hidden = write_logits(call, views, batch, head, slope)
    largest, total = write_exponentials(call, views, hidden)
    if whole.lse is None:
        total[total == 0.0] = 1.0
        weights /= total
    else:  # those of a part of more keys are a share of a larger sum
        of_all = whole.lse[batch, head, queries, None]
        weights *= np.exp(largest - np.where(of_all == -math.inf, 0.0, of_all))
    hidden.put(0.0, weights)  # a query that is not finite stays alone

    d_rows, v = whole.d_out[batch, head, queries], call.v[batch, group, keys]
    v = v if hidden.unseen is None else np.where(hidden.unseen[:, None], 0, v)
    whole.v[batch, group, keys] += weights.T @ d_rows
    d_weights = np.matmul(d_rows, v.T, out=scratch.absolute("d_weights", chunk))
    if call.tables.rel_v is not None:
        _add_values(call, views, head, d_rows, d_weights, sums)
    d_weights -= _delta(whole, weights, d_weights, batch, head, queries)
    d_logits = np.multiply(d_weights, weights, out=d_weights)
    hidden.put(0.0, d_logits)
    if sums.mask is not None:
        target = sums.mask[batch if sums.mask.shape[0] > 1 else 0, head if sums.mask.shape[1] > 1 else 0]
        target = target[chunk.of_mask(target)]
        axes = tuple(axis for axis in (0, 1) if target.shape[axis] != d_logits.shape[axis])
        target += d_logits.sum(axis=axes, keepdims=True) if axes else d_logits
    if slope is not None:
        d_logits *= np.nan_to_num(slope, copy=False)  # what is hidden need not be finite

    q = call.q[batch, head, queries]
    whole.k[batch, group, keys] += d_logits.T @ (q * options.scale)
    k = call.k[batch, group, keys]
    k = k if hidden.unseen is None else np.where(hidden.unseen[:, None], 0, k)
    whole.q[batch, head, queries] += (d_logits @ k) * options.scale
    if call.tables.rel_k is not None or call.tables.rel_bias is not None:
        _add_relative(call, views, batch, head, d_logits, whole, sums)


def _delta(whole: _Whole, weights: Array, d_weights: Array, batch: int, head: int, queries: slice) -> Array:
    """Return the mean by weight of the weights' gradients, less the gradient of the log-sum-exp, (n, 1)."""
    if whole.delta is None:
        delta = np.einsum("ij,ij->i", weights, d_weights)[:, None]
    else:
        delta = whole.delta[batch, head, queries, None]
    return delta if whole.d_lse is None else delta - whole.d_lse[batch, head, queries, None]


def _in_relative_layout(views: Views, x: Array) -> Array:
    """Write (n, m) in absolute layout over the views' memory in relative layout, (n, width)."""
    views.relative[...] = 0.0
    views.moved[...] = x
    return views.relative


def _add_values(call: HeadwiseCall, views: Views, head: int, d_rows: Array, d_weights: Array, sums: _Sums) -> None:
    """Add what ``rel_v`` adds to the gradient of the weights, and to its own gradient."""
    table, chunk, target = call.tables.rel_v, views.chunk, sums.rel_v
    assert table is not None
    assert target is not None
    seen, low, high = visible_columns(_in_relative_layout(views, views.logits), chunk, call.options)
    if low > high:
        return
    extension = table.plan(low, high)
    rows = slice(extension.start, extension.stop)
    target[head % len(target), rows] += extension.fold(seen, xp=xp).T @ d_rows
    product = extension.widen(d_rows @ call.of_table(table, head)[:, rows], xp=xp)
    views.relative[...] = 0.0
    views.relative[:, low - chunk.low : high - chunk.low + 1] = product
    d_weights += views.moved


def _add_relative(
    call: HeadwiseCall, views: Views, batch: int, head: int, d_logits: Array, whole: _Whole, sums: _Sums
) -> None:
    """Add the gradients of ``rel_bias``, ``rel_k`` and the queries that meet it."""
    chunk, tables, scale = views.chunk, call.tables, call.options.rel_scale
    seen, low, high = visible_columns(_in_relative_layout(views, d_logits), chunk, call.options)
    if low > high:
        return
    if tables.rel_bias is not None and sums.rel_bias is not None:
        extension = tables.rel_bias.plan(low, high)
        target = sums.rel_bias[head % len(sums.rel_bias), extension.start : extension.stop]
        target[:, 0] += extension.fold(seen, xp=xp).sum(axis=0)
    if tables.rel_k is not None and sums.rel_k is not None:
        extension = tables.rel_k.plan(low, high)
        rows, core = slice(extension.start, extension.stop), extension.fold(seen, xp=xp)
        queries = slice(chunk.start, chunk.stop)
        q = (call.q if call.rel_q is None else call.rel_q)[batch, head, queries]
        sums.rel_k[head % len(sums.rel_k), rows] += core.T @ (q * scale)
        whole.rel_q[batch, head, queries] += (core @ call.of_table(tables.rel_k, head)[:, rows].T) * scale


def _gradients(call: HeadwiseCall, operands: Operands, whole: _Whole, sums: list[_Sums]) -> Gradients:
    """Return everything in the shapes of the call's operands."""

    def total(name: str) -> Array:
        found: Array = sum(getattr(own, name) for own in sums[1:]) + getattr(sums[0], name)
        return found

    def of_table(name: str) -> Array | None:
        if getattr(operands, name) is None:
            return None
        table: Table = getattr(call.tables, name)
        rows = total(name).reshape(np.swapaxes(table.columns, -1, -2).shape)
        gradient = table.gradient(np.swapaxes(rows, -1, -2), xp=xp)
        return gradient[..., 0] if name == "rel_bias" else gradient

    mask = None
    if operands.mask is not None and sums[0].mask is not None:
        mask = total("mask")
        if mask.size != operands.mask.size:  # it broadcasts along some of the batch axes
            mask = sum_to(mask.reshape(*operands.q.shape[:-3], *mask.shape[1:]), operands.mask.shape[:-2], xp=xp)
        mask = mask.reshape(operands.mask.shape)
    return Gradients(
        q=whole.q.reshape(operands.q.shape),
        k=whole.k.reshape(operands.k.shape),
        v=whole.v.reshape(operands.v.shape),
        rel_q=None if operands.rel_q is None else whole.rel_q.reshape(operands.rel_q.shape),
        mask=mask,
        **{name: of_table(name) for name in TABLES if name != "key_table"},
    )
