"""Triton: the backward kernels for keys, values and tables. Without atomics, so results are bit-identical."""

# Kernels are written in Triton's language, not Python's: they have no types, and constants are in capitals.
# mypy: ignore-errors
# pyright: basic, reportGeneralTypeIssues=false
# ruff: noqa: N803, N806  # what is known when a kernel is compiled is in capitals

from __future__ import annotations

import triton
import triton.language as tl

from relskew_core.backends._torch.triton.kernels import tiles
from relskew_core.backends._torch.triton.kernels.queries import add_tile, end_part, load_sums, tile_gradient


@triton.jit(do_not_specialize=[*tiles.Numbers._fields])
def key_gradient_kernel(
    x, n_queries, n_keys, offset, lowest, highest, band_low, band_high, threshold,
    d_out, row_sums, delta, d_k, d_v, d_mask, d_logits, far_logits,
    chunk_start, chunk_stop, first_position, width,
):  # fmt: skip
    """Compute the gradients of ``B`` keys and values of one key head, from all heads of its group in turn.

    ``d_mask`` is (batch · heads, n_keys), of a mask that is the same for all queries. ``d_logits``, for the gradient of
    ``x.key_table``, is (batch · heads, chunk, width) by keys, column ``c`` for the position ``first_position + c`` of a
    query as seen from a key, or for the table's row ``c``; ``far_logits`` is (2, batch · heads, n_keys).
    """
    n = tiles.Numbers(n_queries, n_keys, offset, lowest, highest, band_low, band_high, threshold)
    j0 = chunk_start + tl.program_id(0) * x.B
    program = tl.program_id(1).to(tl.int64)
    key_heads = x.heads // x.group
    b, key_head = program // key_heads, program % key_heads
    j = j0 + tl.arange(0, x.B)
    here = j < n.n_keys
    k_tile = tiles.load_rows(tiles.head_of(x.k, b, key_head), j, x.k.row, here, x.D, x.BLOCK_D)
    v_tile = tiles.load_rows(tiles.head_of(x.v, b, key_head), j, x.v.row, here, x.DV, x.BLOCK_DV)
    start, band_start, band_stop, stop = tiles.queries_of(j0, b, x, n)
    k_sums = tl.zeros((x.B, x.BLOCK_D), tl.float32)
    rel_sums = k_sums
    v_sums = tl.zeros((x.B, x.BLOCK_DV), tl.float32)
    for member in tl.range(0, x.group):
        h = key_head * x.group + member
        of_head = b * x.heads + h
        rows_before = of_head * n.n_queries
        mask_sums = tl.zeros((x.B,), tl.float32)
        line = of_head * (chunk_stop - chunk_start) + j - chunk_start
        for PART in tl.static_range(x.FIRST_PART, x.LAST_PART + 1):
            # the furthest ahead first
            part_start, part_stop = tiles.part_of(2 - PART, start, band_start, band_stop, stop)
            waiting, far = tl.zeros((x.B, x.B), k_tile.dtype), tl.zeros((x.B,), tl.float32)
            for i0 in tl.range(part_start, part_stop, x.B):
                i = i0 + tl.arange(0, x.B)
                seen = i < n.n_queries
                q_tile = tiles.load_rows(tiles.head_of(x.q, b, h), i, x.q.row, seen, x.D, x.BLOCK_D)
                do = tiles.load_rows(d_out + rows_before * x.DV, i, x.DV, seen, x.DV, x.BLOCK_DV)
                most, log = load_sums(row_sums + 2 * rows_before, i, seen)
                delta_row = tl.load(delta + rows_before + i, mask=seen, other=0.0)
                hashes = tiles.hashes_of(of_head, i, x, n)
                rel_q_tile = q_tile
                if x.rel_q is not None:
                    rel_q_tile = tiles.load_rows(tiles.head_of(x.rel_q, b, h), i, x.rel_q.row, seen, x.DR, x.BLOCK_DR)
                relative = tiles.relative_edge(rel_q_tile, x.rel_k, x.rel_bias, h, x.rel_scale, x, PART,
                                               x.DR, x.BLOCK_DR)  # fmt: skip
                v_relative = tiles.relative_edge(do, x.rel_v, None, h, 1.0, x, PART, x.DV, x.BLOCK_DV)
                row = tiles.rows_of_pairs(i0, j0, b, x, n)
                p, ds_mask, ds = tile_gradient(q_tile, rel_q_tile, do, k_tile, v_tile, relative, v_relative, most, log,
                                               delta_row, hashes, row, i0, j0, b, h, x, n, PART)  # fmt: skip
                v_sums = tl.dot(tl.trans(p.to(do.dtype)), do, v_sums, input_precision=x.PRECISION)
                k_sums = tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile, k_sums, input_precision=x.PRECISION)
                if d_mask is not None:
                    mask_sums += tl.sum(ds_mask, 0)
                if x.key_table is not None:
                    if not x.APART:
                        rel_sums = k_sums
                    rel_sums, waiting, far = add_tile(
                        rel_sums, waiting, far, tl.trans(ds), tiles.turned(row, x), x.key_table, h, i0 + n.offset - j0,
                        d_logits, line, here, first_position, width, x, n, PART, x.D, x.BLOCK_D, -1)  # fmt: skip
                    if not x.APART:
                        k_sums = rel_sums
            if x.key_table is not None:
                ends = part_start + n.offset - j0 + (part_stop - part_start - 1) // x.B * x.B  # of the last tile
                place = ((0 if PART == 0 else 1) * tl.num_programs(1).to(tl.int64) * x.group + of_head) * n.n_keys + j
                if not x.APART:
                    rel_sums = k_sums
                rel_sums = end_part(rel_sums, waiting, far, x.key_table, h, ends, d_logits, far_logits, line, place,
                                    here, first_position, width, part_stop > part_start, x, n,
                                    PART, x.D, x.BLOCK_D, -1)  # fmt: skip
                if not x.APART:
                    k_sums = rel_sums
        if d_mask is not None:
            tl.store(d_mask + of_head * n.n_keys + j, mask_sums, mask=here)
    k_sums *= x.scale
    if x.APART and x.key_table is not None:
        k_sums += rel_sums * x.rel_scale
    tiles.store_rows(d_k + program * n.n_keys * x.D, j, x.D, here, k_sums, x.D, x.BLOCK_D)
    tiles.store_rows(d_v + program * n.n_keys * x.DV, j, x.DV, here, v_sums, x.DV, x.BLOCK_DV)


@triton.jit(do_not_specialize=["chunk_start", "chunk_stop", "first_column"])
def table_gradient_kernel(
    x, rows, sums, batch, group, chunk_start, chunk_stop, width, first_column, all_columns, slab_rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Add ``xᵀ rows`` to ``sums``: a window of positions of one head, over a slab of the chunk's queries of all items.

    ``x`` is (batch · heads, chunk, width) in relative layout, ``sums`` (slabs, heads, all_columns, D). ``group`` heads
    have the same rows, which may contain NaN if some are ``HIDDEN``.
    """
    h, heads, slab = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64), tl.program_id(2)
    columns = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.zeros((B, BLOCK_D), tl.float32)
    slab_start = slab * slab_rows
    slab_stop = tl.minimum(slab_start + slab_rows, chunk_stop - chunk_start)
    for b in tl.range(0, batch):
        own = x + (b * heads + h) * (chunk_stop - chunk_start) * width
        y = tiles.head_of(rows, b, h // group)
        for row in tl.range(slab_start, slab_stop, B):
            i = row + tl.arange(0, B)
            here = i < slab_stop
            tile = tl.load(own + i.to(tl.int64)[:, None] * width + columns[None, :],
                           mask=here[:, None] & (columns < width)[None, :], other=0.0)  # fmt: skip
            terms = tiles.load_rows(y, chunk_start + i, rows.row, here, D, BLOCK_D)
            if HIDDEN:
                terms = tiles.weighed(terms, tl.trans(tile))
            total = tl.dot(tl.trans(tile.to(terms.dtype)), terms, total, input_precision=PRECISION)
    sums += (slab * heads + h) * all_columns * D
    total += tiles.load_rows(sums, first_column + columns, D, columns < width, D, BLOCK_D)
    tiles.store_rows(sums, first_column + columns, D, columns < width, total, D, BLOCK_D)
