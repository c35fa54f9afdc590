"""Triton: tiles of queries against keys, and the skew within a tile.

A tile has as many queries as keys, ``B``. The relative positions in it are ``first + c`` with ``c = j - i`` from
``-(B - 1)`` to ``B - 1``: two *windows* of ``B`` table rows, the one before ``first`` and the one from it on. The next
tile of keys starts a window later, so its earlier window is this tile's later one: one new product a tile is enough.
"""

# Kernels are written in Triton's language, not Python's: they have no types, and constants are in capitals.
# mypy: ignore-errors
# pyright: basic, reportGeneralTypeIssues=false
# ruff: noqa: N803  # what is known when a kernel is compiled is in capitals

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from relskew_core._kernel import dropout
from relskew_core._kernel.dropout import signed
from relskew_core.backends._torch.triton.kernels import shuffles

LOG2E = tl.constexpr(1.4426950408889634)
BOOLEAN, ADDITIVE = tl.constexpr(1), tl.constexpr(2)
HIDDEN, BEYOND = tl.constexpr(-1), tl.constexpr(-2)
"""Instead of a table's row: of pairs that may not see each other, and of positions past a table that does not clip."""
SKEW, SKEW_REGISTERS = tl.constexpr(shuffles.ptx("skew")), tl.constexpr(shuffles.constraints("skew"))
SKEW_AND_ROW = tl.constexpr(shuffles.constraints("skew", rows=True))
UNSKEW, UNSKEW_REGISTERS = tl.constexpr(shuffles.ptx("unskew")), tl.constexpr(shuffles.constraints("unskew"))
FIRST, SECOND = tl.constexpr(signed(dropout.FIRST)), tl.constexpr(signed(dropout.SECOND))


Rows = namedtuple("Rows", "at b h row column", defaults=[1])
"""An array and its strides: along items, heads, rows, and columns."""

Call = namedtuple(
    "Call",
    # rows; `met_by_queries` has for each tile the first key and the end of those that its labels may let it see
    "q k v rel_q rel_k rel_v rel_bias key_table mask q_segments k_segments q_positions k_positions "
    "met_by_queries met_by_keys "
    "q_hashes k_hashes "  # of dropout: (batch · heads · n_queries,), (n_keys,)
    # `behind` is how far before its own block a query sees, `kept` the factor of weights that are not dropped
    "heads group before after block_size behind span_left table_rows scale rel_scale softcap kept "
    # the constants of a program; `KEY_MASK`: the mask is the same for all queries, `STRICT`: no table may be too short
    "D DV DR BLOCK_D BLOCK_DV BLOCK_DR B BEFORE AFTER LOCAL MASK KEY_MASK SOFTCAP FIRST_PART LAST_PART EDGES STRICT "
    "APART PRECISION SHUFFLES",
)
"""What all kernels of a call get: arrays, which may be ``None``, numbers and constants."""

Numbers = namedtuple("Numbers", "n_queries n_keys offset lowest highest band_low band_high threshold")
"""Numbers that change from call to call, for which nothing is compiled anew.

Kernels take them one by one: Triton 3.9 specialises the items of a tuple despite ``do_not_specialize``.
"""


@triton.jit
def head_of(rows, b, h):
    """Return where the rows of a head begin."""
    return rows.at + b * rows.b + h * rows.h


@triton.jit
def load_rows(base, rows, stride, seen, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of ``WIDTH`` numbers as (len(rows), BLOCK), zeros for hidden ones and past the width."""
    columns = tl.arange(0, BLOCK)
    keep = seen[:, None]
    if WIDTH != BLOCK:
        keep = keep & (columns < WIDTH)[None, :]
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=keep, other=0.0)


@triton.jit
def store_rows(base, rows, stride, seen, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows in the form of :func:`load_rows`."""
    columns = tl.arange(0, BLOCK)
    keep = seen[:, None]
    if WIDTH != BLOCK:
        keep = keep & (columns < WIDTH)[None, :]
    tl.store(base + rows[:, None] * stride + columns[None, :], x.to(base.dtype.element_ty), mask=keep)


@triton.jit
def load_window(table, h, first, x, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIGN: tl.constexpr = 1):
    """Load the table rows of the positions ``first … first + B - 1``: edges repeat, hidden rows are zero.

    With a ``SIGN`` of -1 they are those of keys' queries, and the rows those of their negatives.
    """
    r = SIGN * (first + tl.arange(0, x.B))
    rows = tl.minimum(tl.maximum(r + x.span_left, 0), x.table_rows - 1)
    return load_rows(table.at + h * table.h, rows, table.row, (r >= n.lowest) & (r <= n.highest), WIDTH, BLOCK)


@triton.jit
def relative_window(
    rows, table, bias, h, first, scale, x, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIGN: tl.constexpr = 1
):  # fmt: skip
    """Return the products of a tile's rows with the positions ``first … first + B - 1``, (B, B), relative layout."""
    y = tl.zeros((x.B, x.B), tl.float32)
    if table is not None:
        window = load_window(table, h, first, x, n, WIDTH, BLOCK, SIGN)
        y = tl.dot(rows, tl.trans(window), input_precision=x.PRECISION) * scale
    if bias is not None:
        r = first + tl.arange(0, x.B)
        row = tl.minimum(tl.maximum(r + x.span_left, 0), x.table_rows - 1)
        seen = (r >= n.lowest) & (r <= n.highest)
        y += tl.load(bias.at + h * bias.h + row, mask=seen, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def relative_edge(rows, table, bias, h, scale, x, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the products of a tile's rows with every position past an edge of the span, (B,)."""
    y = tl.zeros((x.B,), tl.float32)
    if x.EDGES and PART != 1:
        row = 0 if PART == 0 else x.table_rows - 1
        if table is not None:
            edge = load_row(table.at + h * table.h + row * table.row, WIDTH, BLOCK)
            y = tl.sum(rows.to(tl.float32) * edge[None, :], 1) * scale
        if bias is not None:
            y += tl.load(bias.at + h * bias.h + row).to(tl.float32)
    return y


@triton.jit
def relative_term(
    rows, table, bias, h, first, scale, edge, row, x, n,
    PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIGN: tl.constexpr = 1,
):  # fmt: skip
    """Return the products of a tile's rows with the positions of their pairs, (B, B); the lowest one is ``first``."""
    if x.q_positions is not None:
        y = looked_up(rows, table, bias, h, row, scale, x, WIDTH, BLOCK)
    elif PART == 1:
        earlier = relative_window(rows, table, bias, h, first - x.B, scale, x, n, WIDTH, BLOCK, SIGN)
        later = relative_window(rows, table, bias, h, first, scale, x, n, WIDTH, BLOCK, SIGN)
        y = skew(earlier, later, x.B, x.SHUFFLES, table is None)
    else:
        y = tl.zeros((x.B, x.B), tl.float32) + edge[:, None]
    return y


@triton.jit
def product(
    rows, columns, scale, rel_rows, table, bias, h, first, rel_scale, edge, row, x, n,
    PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the products of a tile's rows with its columns and with their positions, the lowest of which is ``first``.

    Those with positions are first, because registers are few.
    """
    y = tl.zeros((x.B, x.B), tl.float32)
    if table is not None or bias is not None:
        y = relative_term(rel_rows, table, bias, h, first, rel_scale, edge, row, x, n, PART, WIDTH, BLOCK)
    return y + tl.dot(rows, tl.trans(columns), input_precision=x.PRECISION) * scale


@triton.jit
def with_key_table(s, k_tile, h, first, row, x, n, PART: tl.constexpr):
    """Add the products of a tile's keys with the positions of their pairs: the term of queries, seen from the keys."""
    if x.key_table is not None:
        edge = relative_edge(k_tile, x.key_table, None, h, x.rel_scale, x, PART, x.D, x.BLOCK_D)
        s += tl.trans(relative_term(k_tile, x.key_table, None, h, -first, x.rel_scale, edge, turned(row, x), x, n,
                                    PART, x.D, x.BLOCK_D, -1))  # fmt: skip
    return s


@triton.jit
def turned(row, x):
    """Return the rows of a tile's pairs by key and query."""
    if x.q_positions is not None:
        row = tl.trans(row)
    return row


@triton.jit
def rows_of_pairs(i0, j0, b, x, n):
    """Return the table's row of each pair of a tile, ``HIDDEN`` or ``BEYOND``; no rows if positions are consecutive."""
    row = i0 * 0
    if x.q_positions is not None:
        i, j = i0 + tl.arange(0, x.B), j0 + tl.arange(0, x.B)
        own = tl.load(x.q_positions.at + b * x.q_positions.b + i, mask=i < n.n_queries, other=0).to(tl.int64)
        others = tl.load(x.k_positions.at + b * x.k_positions.b + j, mask=j < n.n_keys, other=0).to(tl.int64)
        place = others[None, :] - own[:, None] + x.span_left
        row = tl.minimum(tl.maximum(place, 0), x.table_rows - 1)
        if not x.EDGES:
            row = tl.where(row == place, row, BEYOND)
        row = tl.where(sees(i, j, own, others, x, n), row, HIDDEN).to(tl.int32)
    return row


@triton.jit
def ends_of(row, x):
    """Return the first and the last row of the table that some pair of a tile has."""
    return tl.min(tl.min(tl.where(row < 0, x.table_rows, row), 1), 0), tl.max(tl.max(row, 1), 0)


@triton.jit
def looked_up(rows, table, bias, h, row, scale, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the products of a tile's rows with the table's row of each pair, zeros for those without one, (B, B)."""
    y = tl.zeros((x.B, x.B), tl.float32)
    if bias is not None:
        y += tl.load(bias.at + h * bias.h + row, mask=row >= 0, other=0.0).to(tl.float32)
    if table is not None:
        low, high = ends_of(row, x)
        for first in tl.range(low // x.B * x.B, high + 1, x.B):
            r = first + tl.arange(0, x.B)
            window = load_rows(table.at + h * table.h, r, table.row, r < x.table_rows, WIDTH, BLOCK)
            found = tl.dot(rows, tl.trans(window), input_precision=x.PRECISION) * scale
            here = (row >= first) & (row < first + x.B)
            y += tl.where(here, tl.gather(found, row & (x.B - 1), 1), 0.0)
    return y


@triton.jit
def looked_up_sums(
    sums, y, row, table, h, buffer, lines, here, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add the table's rows by the numbers ``y`` of a tile's pairs, and the numbers to the lines of a buffer.

    The buffer is (…, table_rows). Other programs have other lines: its numbers are added in one order.
    """
    low, high = ends_of(row, x)
    columns = tl.arange(0, x.B)
    for first in tl.range(low // x.B * x.B, high + 1, x.B):
        window = tl.zeros((x.B, x.B), tl.float32)
        for r in tl.range(tl.maximum(low, first), tl.minimum(high + 1, first + x.B)):
            of_row = tl.sum(tl.where(row == r, y, 0.0), 1)
            window = tl.where((first + columns == r)[None, :], of_row[:, None], window)
        there = first + columns < x.table_rows
        if buffer is not None:
            at = buffer + lines.to(tl.int64)[:, None] * x.table_rows + (first + columns)[None, :]
            tl.atomic_add(at, window, mask=here[:, None] & there[None, :], sem="relaxed")
        if table is not None:
            rows = load_rows(table.at + h * table.h, first + columns, table.row, there, WIDTH, BLOCK)
            rows = weighed(rows, window)
            sums = tl.dot(window.to(rows.dtype), rows, sums, input_precision=x.PRECISION)
    return sums


@triton.jit
def weighed(rows, weights):
    """Return rows, zeros for those without a weight in some line of (B, B): they may contain NaN."""
    return tl.where((tl.max((weights != 0).to(tl.int32), 0) > 0)[:, None], rows, 0.0)


@triton.jit
def load_row(base, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load one row of ``WIDTH`` numbers as float32, (BLOCK,)."""
    columns = tl.arange(0, BLOCK)
    return tl.load(base + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def skew(earlier, later, B: tl.constexpr, SHUFFLES: tl.constexpr, ALIKE: tl.constexpr):
    """Turn two windows in relative layout into the tile in absolute layout: one gather within rows.

    ``ALIKE``: all rows of a window are alike. Triton takes the assembly for a function of single numbers, and would
    call it for one row only, unless it also gets the number of the row.
    """
    i, c = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    if SHUFFLES and ALIKE:
        row = tl.broadcast_to(i, (B, B))
        x = tl.inline_asm_elementwise(SKEW, SKEW_AND_ROW, [earlier, later, row], tl.float32, is_pure=True, pack=32)
    elif SHUFFLES:
        x = tl.inline_asm_elementwise(SKEW, SKEW_REGISTERS, [earlier, later], tl.float32, is_pure=True, pack=32)
    else:
        x = tl.gather(tl.where(i + c >= B, earlier, later), (c - i) & (B - 1), 1)
    return x


@triton.jit
def unskew(s, B: tl.constexpr, SHUFFLES: tl.constexpr):
    """Turn a tile in absolute layout into its two windows in relative layout: the adjoint of :func:`skew`."""
    if SHUFFLES:
        earlier, later = tl.inline_asm_elementwise(
            UNSKEW, UNSKEW_REGISTERS, [s], (tl.float32, tl.float32), is_pure=True, pack=32)  # fmt: skip
    else:
        i, c = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
        turned = tl.gather(s, (i + c) & (B - 1), 1)
        earlier, later = tl.where(i + c >= B, turned, 0.0), tl.where(i + c >= B, 0.0, turned)
    return earlier, later


@triton.jit
def softcapped(s, softcap, SOFTCAP: tl.constexpr):
    """Return ``softcap · tanh(s / softcap)``."""
    if SOFTCAP:
        x = s / softcap
        y = x * x
        # near zero, Cephes' tanhf as a series: a difference from 1 would leave few digits of small logits
        near = (((-5.70498872745e-3 * y + 2.06390887954e-2) * y - 5.37397155531e-2) * y + 1.33314422036e-1) * y
        near = x + x * y * (near - 3.33332819422e-1)
        s = softcap * tl.where(tl.abs(x) < 0.625, near, 2.0 * tl.sigmoid(2.0 * x) - 1.0)
    return s


@triton.jit
def floored(position, size):
    """Return where the block of a position begins; Triton's division rounds towards zero."""
    return tl.where(position < 0, -((size - 1 - position) // size) * size, position // size * size)


@triton.jit
def sees(i, j, own, others, x, n):
    """Return which queries ``i`` at their ``own`` positions may see which keys ``j`` at others, (B, B)."""
    seen = (i < n.n_queries)[:, None] & (j < n.n_keys)[None, :]
    if x.AFTER:
        seen = seen & (others[None, :] <= (own + x.after)[:, None])
    if x.BEFORE:
        seen = seen & (others[None, :] >= (own - x.before)[:, None])
    if x.LOCAL:
        block = floored(own, x.block_size)[:, None]
        seen = seen & (others[None, :] >= block - x.behind) & (others[None, :] < block + x.block_size)
    return seen


@triton.jit
def masked(s, row, i0, j0, b, h, x, n):
    """Put ``-inf`` where a query ``i0 …`` may not see a key ``j0 …``, and add an additive mask."""
    i, j = i0 + tl.arange(0, x.B), j0 + tl.arange(0, x.B)
    if x.q_positions is not None:
        if x.STRICT:
            s = tl.where(row == BEYOND, float("nan"), s)
        s = tl.where(row == HIDDEN, -float("inf"), s)
    else:
        first, last = i0 + n.offset, i0 + n.offset + x.B - 1  # positions of the tile's queries
        partly = (i0 + x.B > n.n_queries) | (j0 + x.B > n.n_keys)
        if x.AFTER:
            partly = partly | (j0 + x.B - 1 > first + x.after)
        if x.BEFORE:
            partly = partly | (j0 < last - x.before)
        if x.LOCAL:
            partly = partly | (j0 < floored(last, x.block_size) - x.behind)
            partly = partly | (j0 + x.B > floored(first, x.block_size) + x.block_size)
        if partly:
            s = tl.where(sees(i, j, i + n.offset, j, x, n), s, -float("inf"))
    if x.q_segments is not None:
        own = tl.load(x.q_segments.at + b * x.q_segments.b + i, mask=i < n.n_queries, other=0)
        others = tl.load(x.k_segments.at + b * x.k_segments.b + j, mask=j < n.n_keys, other=0)
        s = tl.where(own[:, None] == others[None, :], s, -float("inf"))
    if x.MASK:
        mask = head_of(x.mask, b, h)
        if x.KEY_MASK:
            y = tl.load(mask + j * x.mask.column, mask=j < n.n_keys, other=0)[None, :]
        else:
            here = (i < n.n_queries)[:, None] & (j < n.n_keys)[None, :]
            y = tl.load(mask + i[:, None] * x.mask.row + j[None, :] * x.mask.column, mask=here, other=0)
        if x.MASK == ADDITIVE:
            s = tl.where(y == -float("inf"), y.to(tl.float32), s + y.to(tl.float32))
        else:
            s = tl.where(y != 0, s, -float("inf"))
    return s


@triton.jit
def thinned(y, hashes, j0, x, n):
    """Return a tile without the weights that are dropped, the others divided by the share that is kept."""
    if x.k_hashes is not None:
        j = j0 + tl.arange(0, x.B)
        z = hashes[:, None] ^ tl.load(x.k_hashes + j, mask=j < n.n_keys, other=0)[None, :]
        z = (z ^ ((z >> 16) & 0xFFFF)) * FIRST
        z = (z ^ ((z >> 13) & 0x7FFFF)) * SECOND
        y = tl.where(z < n.threshold, 0.0, y * x.kept)
    return y


@triton.jit
def hashes_of(program, i, x, n):
    """Load the hashes of a tile's queries; zeros if nothing is dropped."""
    if x.q_hashes is None:
        hashes = i * 0
    else:
        hashes = tl.load(x.q_hashes + program * n.n_queries + i, mask=i < n.n_queries, other=0)
    return hashes


@triton.jit
def keys_of(i0, b, x, n):
    """Return the first and the end of the keys that some query ``i0 …`` sees, and the borders of the parts.

    The tiles ``start … band_start`` lie wholly at or before ``band_low``, ``band_stop … stop`` at or after
    ``band_high``.
    """
    position = i0 + n.offset
    low, high = position * 0, n.n_keys
    if x.BEFORE and x.q_positions is None:
        low = tl.maximum(low, position - x.before)
    if x.AFTER and x.q_positions is None:
        high = tl.minimum(high, tl.minimum(i0 + x.B, n.n_queries) + n.offset + x.after)
    if x.LOCAL and x.q_positions is None:
        last = tl.minimum(i0 + x.B, n.n_queries) - 1 + n.offset
        low = tl.maximum(low, floored(position, x.block_size) - x.behind)
        high = tl.minimum(high, floored(last, x.block_size) + x.block_size)
    if x.met_by_queries is not None:
        met = x.met_by_queries.at + b * x.met_by_queries.b + i0 // x.B * 2
        low, high = tl.maximum(low, tl.load(met)), tl.minimum(high, tl.load(met + 1))
    start = low // x.B * x.B
    stop = tl.maximum(high, start)
    band_start, band_stop = start, stop
    if x.FIRST_PART == 0:
        band_start = tl.maximum(position + n.band_low + 1, 0) // x.B * x.B
        band_start = tl.minimum(tl.maximum(band_start, start), (stop + x.B - 1) // x.B * x.B)
    if x.LAST_PART == 2:
        band_stop = (tl.maximum(position + x.B - 1 + n.band_high, 0) + x.B - 1) // x.B * x.B
        band_stop = tl.minimum(tl.maximum(band_stop, band_start), stop)
    return low, high, start, band_start, band_stop, stop


@triton.jit
def queries_of(j0, b, x, n):
    """Return the borders of the parts of the queries that see some key ``j0 …``, the furthest ahead first."""
    last = tl.minimum(j0 + x.B, n.n_keys) - 1
    low, high = j0 * 0, n.n_queries
    if x.AFTER and x.q_positions is None:
        low = tl.maximum(low, j0 - x.after - n.offset)
    if x.BEFORE and x.q_positions is None:
        high = tl.minimum(high, last + x.before - n.offset + 1)
    if x.LOCAL and x.q_positions is None:
        low = tl.maximum(low, floored(j0, x.block_size) - n.offset)
        high = tl.minimum(high, floored(last, x.block_size) + x.behind + x.block_size - n.offset)
    if x.met_by_keys is not None:
        met = x.met_by_keys.at + b * x.met_by_keys.b + j0 // x.B * 2
        low, high = tl.maximum(low, tl.load(met)), tl.minimum(high, tl.load(met + 1))
    start = low // x.B * x.B
    stop = tl.maximum(high, start)
    band_start, band_stop = start, stop
    if x.LAST_PART == 2:
        band_start = tl.maximum(j0 - n.band_high + 1 - n.offset, 0) // x.B * x.B
        band_start = tl.minimum(tl.maximum(band_start, start), (stop + x.B - 1) // x.B * x.B)
    if x.FIRST_PART == 0:
        band_stop = (tl.maximum(j0 + x.B - 1 - n.band_low - n.offset, 0) + x.B - 1) // x.B * x.B
        band_stop = tl.minimum(tl.maximum(band_stop, band_start), stop)
    return start, band_start, band_stop, stop


@triton.jit
def part_of(PART: tl.constexpr, start, band_start, band_stop, stop):
    """Return where a part begins and ends."""
    if PART == 0:
        first, end = start, band_start
    elif PART == 1:
        first, end = band_start, band_stop
    else:
        first, end = band_stop, stop
    return first, end
