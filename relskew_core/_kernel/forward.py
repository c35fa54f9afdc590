"""The portable forward kernel: one loop over query chunks for every kind of attention.

Scratch is ``chunk × (chunk + keys)`` and never ``queries × keys``.
"""

from __future__ import annotations

import math

from relskew_core._array.known import in_turn, nothing
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import BY_QUERY, Operands, Options
from relskew_core._kernel.chunk import Chunk, chunks
from relskew_core._kernel.view import Tables, View, grouped_matmul


def attention(operands: Operands, options: Options, *, xp: Namespace) -> tuple[Array, Array | None]:
    """Return the output (..., H, Lq, Dv) and, if requested, the sums of weights (..., H, Lq, 2)."""
    laid = list(chunks(operands, options))
    tables = Tables.covering(operands, options, laid, xp=xp)
    outs: list[Array] = []
    sums: list[Array | None] = []
    for chunk in laid:
        now = in_turn(operands, BY_QUERY, outs[-1:], xp=xp)
        if chunk.first == chunk.end:
            out, own = _nothing(now, options, chunk, xp=xp)
        else:
            out, own = attend(View(now, options, tables, chunk, xp=xp), sums=options.return_lse)
        outs.append(out)
        sums.append(own)
    if not outs:
        shape = (*operands.q.shape[:-2], 0)
        outs = [nothing((*shape, operands.v.shape[-1]), operands, xp=xp)]
        sums = [nothing((*shape, 2), operands, xp=xp)]
    if len(outs) == 1:
        return outs[0], sums[0]
    return xp.concat(outs, axis=-2), xp.concat(sums, axis=-2) if options.return_lse else None


def _nothing(operands: Operands, options: Options, chunk: Chunk, *, xp: Namespace) -> tuple[Array, Array | None]:
    """Return the results of queries that see no key."""
    shape = (*operands.q.shape[:-2], chunk.stop - chunk.start)
    out = nothing((*shape, operands.v.shape[-1]), operands, xp=xp)
    return out, nothing((*shape, 2), operands, value=-math.inf, xp=xp) if options.return_lse else None


def attend(view: View, *, sums: bool) -> tuple[Array, Array | None]:
    """Return a chunk's rows of the output and, if requested, its sums of weights."""
    operands, xp = view.operands, view.xp
    logits = view.logits(*view.scaled_queries(), view.seen(operands.k))
    weights, own = view.weights(logits, sums=sums)
    factors = view.factors()
    weights = weights if factors is None else weights * factors
    out = grouped_matmul(weights, view.seen(operands.v), xp=xp)
    if view.tables.rel_v is not None:
        relative, low, high = view.relative(weights)
        if low <= high:
            out = out + view.mixed("rel_v", relative, low, high)
    return out, own
