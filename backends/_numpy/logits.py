"""NumPy: the logits of a chunk and the exponentials of them, written in place."""

from __future__ import annotations

import math

import array_api_compat.numpy as xp
import numpy as np

from relskew_core._array.softmax import NEGLIGIBLE
from relskew_core._kernel.chunk import Chunk
from relskew_core.backends._in_place import fill, regions
from relskew_core.backends._numpy.call import Array, HeadwiseCall
from relskew_core.backends._numpy.scratch import Hidden, Views


def write_logits(call: HeadwiseCall, views: Views, batch: int, head: int, slope: Array | None = None) -> Hidden:
    """Write a chunk's logits and the slope of their softcap, and return what the pattern and segments hide."""
    chunk, logits, options = views.chunk, views.logits, call.options
    group = head * call.k.shape[1] // call.q.shape[1]
    q = call.q[batch, head, chunk.start : chunk.stop] * options.scale
    np.matmul(q, call.k[batch, group, chunk.first : chunk.end].T, out=logits)
    if call.tables.rel_k is not None or call.tables.rel_bias is not None:
        _write_relative(call, batch, head, chunk, q, views.relative)
        logits += views.moved
    if options.softcap is not None:
        logits *= 1 / options.softcap
        np.tanh(logits, out=logits)
        if slope is not None:
            np.multiply(logits, logits, out=slope)
            np.subtract(1.0, slope, out=slope)
        logits *= options.softcap
    hidden = views.hidden(call, batch)
    _hide(call, batch, head, views, hidden)
    return hidden


def write_exponentials(call: HeadwiseCall, views: Views, hidden: Hidden) -> tuple[Array, Array]:
    """Write ``exp(logits - largest)`` over the logits, zeros for what is negligible; return the largest and the sums.

    Both are of rows, (n, 1), a finite number and 0 for one that sees nothing. No subnormal numbers are made on the
    way, which exp and products crawl through.
    """
    logits, negligible = views.logits, views.negligible
    largest = logits.max(axis=-1, keepdims=True)
    if call.dead_rows:
        largest[largest == -math.inf] = 0.0
    logits -= largest
    np.less(logits, NEGLIGIBLE, out=negligible)
    count = np.count_nonzero(negligible)
    if 8 * count < negligible.size:
        if count != hidden.count:  # what is hidden is -inf already
            np.copyto(logits, -math.inf, where=negligible)
        np.exp(logits, out=logits)
    else:  # scattered all over peaky logits, where a masked copy takes longer than a product
        np.maximum(logits, NEGLIGIBLE, out=logits)
        np.exp(logits, out=logits)
        np.logical_not(negligible, out=negligible)
        logits *= negligible
    return largest, (logits @ views.ones)[:, None]  # BLAS takes a third of the time of a sum along rows


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
    if call.mask is not None:
        chunk, logits = views.chunk, views.logits
        mask = call.mask[batch, head, chunk.start : chunk.stop, chunk.first : chunk.end]
        if mask.dtype == bool:
            np.copyto(logits, -math.inf, where=~mask)
        else:
            logits += mask
            np.copyto(logits, -math.inf, where=mask == -math.inf)  # where the products are not finite
    hidden.put(-math.inf, views.logits)  # after the mask, which may be anything there, too
