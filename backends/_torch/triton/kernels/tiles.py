"""Triton: tiles of queries against keys, and the skew within a tile.

A tile has as many queries as keys, ``B``. The relative positions in it are ``first + c`` with ``c = j - i`` from
``-(B - 1)`` to ``B - 1``: two *windows* of ``B`` table rows, the one before ``first`` and the one from it on. The next
tile of keys starts a window later, so its earlier window is this tile's later one: one new product a tile is enough.
"""

# Kernels are written in Triton's language, not Python's: they have no types, and constants are in capitals.
# mypy: ignore-errors
# pyright: basic, reportGeneralTypeIssues=false
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from relskew_core.backends._torch.triton.kernels import shuffles

LOG2E = tl.constexpr(1.4426950408889634)
BOOLEAN, ADDITIVE = tl.constexpr(1), tl.constexpr(2)
SKEW, SKEW_REGISTERS = tl.constexpr(shuffles.ptx("skew")), tl.constexpr(shuffles.constraints("skew"))
SKEW_AND_ROW = tl.constexpr(shuffles.constraints("skew", rows=True))
UNSKEW, UNSKEW_REGISTERS = tl.constexpr(shuffles.ptx("unskew")), tl.constexpr(shuffles.constraints("unskew"))


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
def load_window(
    table, stride, first, span_left, table_rows, lowest, highest,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Load the table rows of the positions ``first … first + B - 1``: edges repeat, hidden rows are zero."""
    r = first + tl.arange(0, B)
    rows = tl.minimum(tl.maximum(r + span_left, 0), table_rows - 1)
    return load_rows(table, rows, stride, (r >= lowest) & (r <= highest), WIDTH, BLOCK)


@triton.jit
def relative_window(
    q, table, stride, bias, first, span_left, table_rows, lowest, highest, rel_scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr,
    REL_K: tl.constexpr, REL_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of a tile's queries with the positions ``first … first + B - 1``, (B, B), relative layout."""
    x = tl.zeros((B, B), tl.float32)
    if REL_K:
        rows = load_window(table, stride, first, span_left, table_rows, lowest, highest, WIDTH, BLOCK, B)
        x = tl.dot(q, tl.trans(rows), input_precision=PRECISION) * rel_scale
    if REL_BIAS:
        r = first + tl.arange(0, B)
        row = tl.minimum(tl.maximum(r + span_left, 0), table_rows - 1)
        x += tl.load(bias + row, mask=(r >= lowest) & (r <= highest), other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def relative_edge(
    q, table, stride, bias, row, rel_scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr,
    REL_K: tl.constexpr, REL_BIAS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Return the products of a tile's queries with every position past an edge of the span, (B,)."""
    x = tl.zeros((B,), tl.float32)
    if EDGES:
        if REL_K:
            x = tl.sum(q.to(tl.float32) * load_row(table + row * stride, WIDTH, BLOCK)[None, :], 1) * rel_scale
        if REL_BIAS:
            x += tl.load(bias + row).to(tl.float32)
    return x


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
def masked(
    s, i0, j0, mask, mask_i, mask_j, n_queries, n_keys, offset, before, after, block_size,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, LOCAL: tl.constexpr, MASK: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Put ``-inf`` where a query ``i0 …`` may not see a key ``j0 …``, and add an additive mask."""
    i, j = i0 + tl.arange(0, B), j0 + tl.arange(0, B)
    first, last = i0 + offset, i0 + offset + B - 1  # positions of the tile's queries
    partly = (i0 + B > n_queries) | (j0 + B > n_keys)
    if AFTER:
        partly = partly | (j0 + B - 1 > first + after)
    if BEFORE:
        partly = partly | (j0 < last - before)
    if LOCAL:
        partly = partly | (j0 < (last // block_size - 1) * block_size)
    if partly:
        seen = (i < n_queries)[:, None] & (j < n_keys)[None, :]
        if AFTER:
            seen = seen & (j[None, :] <= i[:, None] + (offset + after))
        if BEFORE:
            seen = seen & (j[None, :] >= i[:, None] + (offset - before))
        if LOCAL:
            seen = seen & (j[None, :] >= (((i + offset) // block_size - 1) * block_size)[:, None])
        s = tl.where(seen, s, -float("inf"))
    if MASK:
        here = (i < n_queries)[:, None] & (j < n_keys)[None, :]
        x = tl.load(mask + i[:, None] * mask_i + j[None, :] * mask_j, mask=here, other=0)
        if MASK == ADDITIVE:
            s = tl.where(x == -float("inf"), x.to(tl.float32), s + x.to(tl.float32))
        else:
            s = tl.where(x != 0, s, -float("inf"))
    return s


@triton.jit
def keys_of(
    i0, n_queries, n_keys, offset, before, after, block_size, band_low, band_high,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, LOCAL: tl.constexpr,
    FIRST_PART: tl.constexpr, LAST_PART: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Return the first and the end of the keys that some query ``i0 …`` sees, and the borders of the parts.

    The tiles ``start … band_start`` lie wholly at or before ``band_low``, ``band_stop … stop`` at or after
    ``band_high``.
    """
    position = i0 + offset
    low, high = position * 0, n_keys
    if BEFORE:
        low = tl.maximum(low, position - before)
    if LOCAL:
        low = tl.maximum(low, (position // block_size - 1) * block_size)
    if AFTER:
        high = tl.minimum(high, tl.minimum(i0 + B, n_queries) + offset + after)
    start = low // B * B
    stop = tl.maximum(high, start)
    band_start, band_stop = start, stop
    if FIRST_PART == 0:
        band_start = tl.maximum(position + band_low + 1, 0) // B * B
        band_start = tl.minimum(tl.maximum(band_start, start), (stop + B - 1) // B * B)
    if LAST_PART == 2:
        band_stop = (tl.maximum(position + B - 1 + band_high, 0) + B - 1) // B * B
        band_stop = tl.minimum(tl.maximum(band_stop, band_start), stop)
    return low, high, start, band_start, band_stop, stop


@triton.jit
def queries_of(
    j0, n_queries, n_keys, offset, before, after, block_size, band_low, band_high,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, LOCAL: tl.constexpr,
    FIRST_PART: tl.constexpr, LAST_PART: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Return the borders of the parts of the queries that see some key ``j0 …``, the furthest ahead first."""
    last = tl.minimum(j0 + B, n_keys) - 1
    low, high = j0 * 0, n_queries
    if AFTER:
        low = tl.maximum(low, j0 - after - offset)
    if BEFORE:
        high = tl.minimum(high, last + before - offset + 1)
    if LOCAL:
        high = tl.minimum(high, (last // block_size + 2) * block_size - offset)
    start = low // B * B
    stop = tl.maximum(high, start)
    band_start, band_stop = start, stop
    if LAST_PART == 2:
        band_start = tl.maximum(j0 - band_high + 1 - offset, 0) // B * B
        band_start = tl.minimum(tl.maximum(band_start, start), (stop + B - 1) // B * B)
    if FIRST_PART == 0:
        band_stop = (tl.maximum(j0 + B - 1 - band_low - offset, 0) + B - 1) // B * B
        band_stop = tl.minimum(tl.maximum(band_stop, band_start), stop)
    return start, band_start, band_stop, stop
