"""Triton: few queries after a long cache, which lies in one array or in pages of a pool.

The rows of a tile are the queries of all heads that share their keys, so that keys and values are read once. The
position of each row is that of its query, so a tile of ``M`` rows and ``B`` keys has ``B`` relative positions if there
is one query, and otherwise those of two windows, as in the tiles of many queries.
"""

# Kernels are written in Triton's language, not Python's: they have no types, and constants are in capitals.
# mypy: ignore-errors
# pyright: basic, reportGeneralTypeIssues=false
# ruff: noqa: N803  # what is known when a kernel is compiled is in capitals

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from relskew_core.backends._torch.triton.kernels.tiles import (
    ADDITIVE,
    LOG2E,
    Numbers,
    load_rows,
    softcapped,
    store_rows,
)

Pages = namedtuple("Pages", "table row lengths last k v SIZE")
"""The pages and the length of each item, the last page of the pool, and the strides from page to page."""


@triton.jit
def rows_at(table, h, first, lowest, highest, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load a head's table rows of the positions ``first … first + B - 1``: edges repeat, hidden rows are zero."""
    r = first + tl.arange(0, x.B)
    rows = tl.minimum(tl.maximum(r + x.span_left, 0), x.table_rows - 1)
    return load_rows(table.at + h * table.h, rows, table.row, (r >= lowest) & (r <= highest), WIDTH, BLOCK)


@triton.jit
def products(rows, member, h, first, lowest, highest, x, M: tl.constexpr, HEADS: tl.constexpr):
    """Return the products of a tile's rows with the table rows of ``B`` positions, each row with those of its head."""
    y = tl.zeros((M, x.B), tl.float32)
    for g in tl.range(0, HEADS):
        window = rows_at(x.rel_k, h + g, first, lowest, highest, x, x.DR, x.BLOCK_DR)
        of_head = tl.dot(rows, tl.trans(window), input_precision=x.PRECISION)
        y = tl.where((member == g)[:, None], of_head, y)
    return y


@triton.jit
def with_values(sums, p, member, h, first, lowest, highest, x, HEADS: tl.constexpr):
    """Add the weights of ``B`` positions times their rows of the values' table."""
    for g in tl.range(0, HEADS):
        window = rows_at(x.rel_v, h + g, first, lowest, highest, x, x.DV, x.BLOCK_DV)
        of_head = tl.where((member == g)[:, None], p, 0.0)
        sums = tl.dot(of_head.to(window.dtype), window, sums, input_precision=x.PRECISION)
    return sums


@triton.jit(do_not_specialize=[*Numbers._fields, "keys_of_program"])
def decoding_kernel(
    x, n_queries, n_keys, offset, lowest, highest, band_low, band_high, threshold,
    pages, out, row_sums, keys_of_program,
    M: tl.constexpr, HEADS: tl.constexpr, ONE: tl.constexpr, REACHES: tl.constexpr,
):  # fmt: skip
    """Attend for ``M`` pairs of a query and a head of one group to a run of ``keys_of_program`` keys.

    ``HEADS`` is the number of tables of a group, ``ONE`` says that there is one query, ``REACHES`` that the table has a
    row for every position: otherwise the others are NaN.
    """
    n = Numbers(n_queries, n_keys, offset, lowest, highest, band_low, band_high, threshold)
    key_heads = x.heads // x.group
    program = tl.program_id(1).to(tl.int64)
    b, h0 = program // key_heads, program % key_heads * x.group
    first_row = tl.program_id(0) * M
    row = first_row + tl.arange(0, M)
    i, member = row // x.group, row % x.group
    h, here = h0 + member, i < n.n_queries
    i0 = first_row // x.group
    away = (i - i0)[:, None]
    c = tl.arange(0, x.B)[None, :]
    if HEADS == 1:
        member = row * 0
    offset, n_keys = n.offset, n.n_keys
    if pages is not None:
        offset = tl.load(pages.lengths + b).to(tl.int32) - n.n_queries
        n_keys = tl.minimum(offset + n.n_queries, n.n_keys)
    first, last = i0 + offset, tl.minimum((first_row + M - 1) // x.group, n.n_queries - 1) + offset  # positions
    low, high = first * 0, n_keys
    if x.BEFORE:
        low = tl.maximum(low, first - x.before)
    if x.AFTER:
        high = tl.minimum(high, last + x.after + 1)
    # Rows that no query of this item sees are not loaded: a weight of zero does not hide NaN.
    lowest, highest = tl.maximum(n.lowest, -last), tl.minimum(n.highest, n_keys - 1 - first)
    start = low // x.B * x.B + tl.program_id(2) * keys_of_program
    stop = tl.minimum(high, start + keys_of_program)
    q_tile = load_rows(x.q.at + b * x.q.b, h * x.q.h + i * x.q.row, 1, here, x.D, x.BLOCK_D)
    rel_q_tile = q_tile
    if x.rel_q is not None:
        rel_q_tile = load_rows(x.rel_q.at + b * x.rel_q.b, h * x.rel_q.h + i * x.rel_q.row, 1, here, x.DR, x.BLOCK_DR)
    k = x.k.at + b * x.k.b + h0 // x.group * x.k.h
    v = x.v.at + b * x.v.b + h0 // x.group * x.v.h

    largest = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, x.BLOCK_DV), tl.float32)
    for j0 in tl.range(start, stop, x.B):
        j = j0 + tl.arange(0, x.B)
        seen = (j >= low) & (j < high)
        k_rows, v_rows = j * x.k.row, j * x.v.row
        if pages is not None:
            page = tl.load(pages.table + b * pages.row + j // pages.SIZE, mask=seen, other=0).to(tl.int64)
            page = tl.minimum(tl.maximum(page, 0), pages.last)
            k_rows = page * pages.k + j % pages.SIZE * x.k.row
            v_rows = page * pages.v + j % pages.SIZE * x.v.row
        k_tile = load_rows(k, k_rows, 1, seen, x.D, x.BLOCK_D)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=x.PRECISION) * x.scale
        if x.rel_k is not None:
            y = products(rel_q_tile, member, h0, j0 - first, lowest, highest, x, M, HEADS)
            if not ONE:
                earlier = products(rel_q_tile, member, h0, j0 - first - x.B, lowest, highest, x, M, HEADS)
                y = tl.gather(tl.where(away + c >= x.B, earlier, y), (c - away) & (x.B - 1), 1)
            s += y * x.rel_scale
        r = j[None, :] - (i + offset)[:, None]
        visible = seen[None, :] & here[:, None]
        if x.AFTER:
            visible = visible & (r <= x.after)
        if x.BEFORE:
            visible = visible & (r >= -x.before)
        if x.rel_bias is not None:
            place = tl.minimum(tl.maximum(r + x.span_left, 0), x.table_rows - 1)
            there = visible & (r >= lowest) & (r <= highest)
            s += tl.load(x.rel_bias.at + (h * x.rel_bias.h)[:, None] + place, mask=there, other=0.0).to(tl.float32)
        s = softcapped(s, x.softcap, x.SOFTCAP)
        if not REACHES:
            s = tl.where((r >= -x.span_left) & (r < x.table_rows - x.span_left), s, float("nan"))
        if x.MASK:
            places = (h * x.mask.h + i * x.mask.row)[:, None] + j[None, :] * x.mask.column
            y = tl.load(x.mask.at + b * x.mask.b + places, mask=visible, other=0)
            if x.MASK == ADDITIVE:
                visible = visible & (y != -float("inf"))
                s += y.to(tl.float32)
            else:
                visible = visible & (y != 0)
        s = tl.where(visible, s, -float("inf"))

        grown = tl.maximum(largest, tl.max(s, 1))
        shift = tl.where(grown == -float("inf"), 0.0, grown) * LOG2E
        p = tl.exp2(s * LOG2E - shift[:, None])
        shrink = tl.exp2(largest * LOG2E - shift)
        total = total * shrink + tl.sum(p, 1)
        largest = grown
        v_tile = load_rows(v, v_rows, 1, seen, x.DV, x.BLOCK_DV)
        sums = sums * shrink[:, None]
        sums = tl.dot(p.to(v_tile.dtype), v_tile, sums, input_precision=x.PRECISION)
        if x.rel_v is not None:
            if ONE:
                sums = with_values(sums, p, member, h0, j0 - first, lowest, highest, x, HEADS)
            else:
                turned, over = tl.gather(p, (c + away) & (x.B - 1), 1), c + away >= x.B
                earlier, later = tl.where(over, turned, 0.0), tl.where(over, 0.0, turned)
                sums = with_values(sums, earlier, member, h0, j0 - first - x.B, lowest, highest, x, HEADS)
                sums = with_values(sums, later, member, h0, j0 - first, lowest, highest, x, HEADS)

    seen_some = tl.where(total == 0, 1.0, total)
    place = (tl.program_id(2) * tl.num_programs(1).to(tl.int64) * x.group + b * x.heads + h) * n.n_queries + i
    store_rows(out, place, x.DV, here, sums / seen_some[:, None], x.DV, x.BLOCK_DV)
    tl.store(row_sums + 2 * place, largest, mask=here)
    tl.store(row_sums + 2 * place + 1, tl.log(seen_some), mask=here)


@triton.jit(do_not_specialize=["rows", "count"])
def merge_kernel(
    outs, sums, out, row_sums, rows, count, DV: tl.constexpr, BLOCK_DV: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Merge the outputs (count, rows, DV) and the sums of weights of runs of keys for one row, in a fixed order."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, COUNT)
    place, here = part.to(tl.int64) * rows + row, part < count
    most = tl.load(sums + 2 * place, mask=here, other=-float("inf"))
    top = tl.max(most, 0)
    weights = tl.exp(
        most - tl.where(top == -float("inf"), 0.0, top) + tl.load(sums + 2 * place + 1, mask=here, other=0.0)
    )
    total = tl.sum(weights, 0)
    total = tl.where(total == 0, 1.0, total)
    merged = tl.sum(weights[:, None] * load_rows(outs, place, DV, here, DV, BLOCK_DV), 0) / total
    columns = tl.arange(0, BLOCK_DV)
    tl.store(out + row * DV + columns, merged.to(out.dtype.element_ty), mask=columns < DV)
    tl.store(row_sums + 2 * row, top)
    tl.store(row_sums + 2 * row + 1, tl.log(total))
