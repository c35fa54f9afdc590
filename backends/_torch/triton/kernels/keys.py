"""Triton: the backward kernels for keys, values and tables. Without atomics, so results are bit-identical."""

# Kernels are written in Triton's language, not Python's: they have no types, and constants are in capitals.
# mypy: ignore-errors
# pyright: basic, reportGeneralTypeIssues=false
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from relskew_core.backends._torch.triton.kernels.queries import load_sums, tile_gradient
from relskew_core.backends._torch.triton.kernels.tiles import (
    load_rows,
    queries_of,
    relative_edge,
    relative_window,
    skew,
    store_rows,
)


@triton.jit(do_not_specialize=["n_queries", "n_keys", "offset", "lowest", "highest", "band_low", "band_high"])
def key_gradient_kernel(
    q, k, v, rel_q, rel_k, rel_v, rel_bias, mask,
    q_b, q_h, q_i, k_b, k_h, k_j, v_b, v_h, v_j, rel_q_b, rel_q_h, rel_q_i,
    rel_k_h, rel_k_r, rel_v_h, rel_v_r, rel_bias_h, mask_b, mask_h, mask_i, mask_j,
    heads, group, n_queries, n_keys, offset, before, after, block_size,
    span_left, table_rows, lowest, highest, band_low, band_high, scale, rel_scale, softcap,
    d_out, row_sums, delta, d_k, d_v,
    D: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_DR: tl.constexpr, B: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, LOCAL: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    REL_K: tl.constexpr, REL_Q: tl.constexpr, REL_V: tl.constexpr, REL_BIAS: tl.constexpr,
    FIRST_PART: tl.constexpr, LAST_PART: tl.constexpr, EDGES: tl.constexpr, PRECISION: tl.constexpr,
    SHUFFLES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of ``B`` keys and values of one key head, from all heads of its group in turn."""
    j0 = tl.program_id(0) * B
    program = tl.program_id(1).to(tl.int64)
    key_heads = heads // group
    b, key_head = program // key_heads, program % key_heads
    j = j0 + tl.arange(0, B)
    here = j < n_keys
    k_tile = load_rows(k + b * k_b + key_head * k_h, j, k_j, here, D, BLOCK_D)
    v_tile = load_rows(v + b * v_b + key_head * v_h, j, v_j, here, DV, BLOCK_DV)
    start, band_start, band_stop, stop = queries_of(
        j0, n_queries, n_keys, offset, before, after, block_size, band_low, band_high,
        BEFORE, AFTER, LOCAL, FIRST_PART, LAST_PART, B)  # fmt: skip
    k_sums = tl.zeros((B, BLOCK_D), tl.float32)
    v_sums = tl.zeros((B, BLOCK_DV), tl.float32)
    for member in tl.range(0, group):
        h = key_head * group + member
        rows_before = (b * heads + h) * n_queries
        for PART in tl.static_range(FIRST_PART, LAST_PART + 1):
            if PART == 0:  # queries far ahead of the keys
                part_start, part_stop = band_stop, stop
            elif PART == 1:
                part_start, part_stop = band_start, band_stop
            else:
                part_start, part_stop = start, band_start
            edge = 0 if PART == 0 else table_rows - 1
            for i0 in tl.range(part_start, part_stop, B):
                i = i0 + tl.arange(0, B)
                seen = i < n_queries
                q_tile = load_rows(q + b * q_b + h * q_h, i, q_i, seen, D, BLOCK_D)
                do = load_rows(d_out + rows_before * DV, i, DV, seen, DV, BLOCK_DV)
                most, log = load_sums(row_sums + 2 * rows_before, i, seen)
                delta_row = tl.load(delta + rows_before + i, mask=seen, other=0.0)
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
                first = j0 - i0 - offset
                if REL_K or REL_BIAS:
                    rel_q_tile = q_tile
                    if REL_Q:
                        rel_q_tile = load_rows(rel_q + b * rel_q_b + h * rel_q_h, i, rel_q_i, seen, DR, BLOCK_DR)
                    table, bias = rel_k, rel_bias
                    if REL_K:
                        table = rel_k + h * rel_k_h
                    if REL_BIAS:
                        bias = rel_bias + h * rel_bias_h
                    if PART == 1:
                        earlier = relative_window(rel_q_tile, table, rel_k_r, bias, first - B, span_left, table_rows,
                                                  lowest, highest, rel_scale,
                                                  DR, BLOCK_DR, B, REL_K, REL_BIAS, PRECISION)  # fmt: skip
                        later = relative_window(rel_q_tile, table, rel_k_r, bias, first, span_left, table_rows,
                                                lowest, highest, rel_scale,
                                                DR, BLOCK_DR, B, REL_K, REL_BIAS, PRECISION)  # fmt: skip
                        s += skew(earlier, later, B, SHUFFLES, not REL_K)
                    else:
                        s += relative_edge(rel_q_tile, table, rel_k_r, bias, edge, rel_scale,
                                           DR, BLOCK_DR, B, REL_K, REL_BIAS, EDGES)[:, None]  # fmt: skip
                dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)  # last, because registers are few
                if REL_V:
                    values = rel_v + h * rel_v_h
                    if PART == 1:
                        earlier = relative_window(do, values, rel_v_r, values, first - B, span_left, table_rows,
                                                  lowest, highest, 1.0,
                                                  DV, BLOCK_DV, B, True, False, PRECISION)  # fmt: skip
                        later = relative_window(do, values, rel_v_r, values, first, span_left, table_rows,
                                                lowest, highest, 1.0,
                                                DV, BLOCK_DV, B, True, False, PRECISION)  # fmt: skip
                        dp += skew(earlier, later, B, SHUFFLES, False)
                    else:
                        dp += relative_edge(do, values, rel_v_r, values, edge, 1.0,
                                            DV, BLOCK_DV, B, True, False, EDGES)[:, None]  # fmt: skip
                mask_of_head = mask
                if MASK:
                    mask_of_head = mask + b * mask_b + h * mask_h
                p, _, ds = tile_gradient(
                    s, dp, most, log, delta_row, i0, j0, mask_of_head, mask_i, mask_j, n_queries, n_keys, offset,
                    before, after, block_size, softcap, BEFORE, AFTER, LOCAL, MASK, SOFTCAP, B)  # fmt: skip
                v_sums = tl.dot(tl.trans(p.to(do.dtype)), do, v_sums, input_precision=PRECISION)
                k_sums = tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile, k_sums, input_precision=PRECISION)
    store_rows(d_k + program * n_keys * D, j, D, here, k_sums * scale, D, BLOCK_D)
    store_rows(d_v + program * n_keys * DV, j, DV, here, v_sums, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["chunk_start", "chunk_stop", "first_column"])
def table_gradient_kernel(
    x, y, sums, y_b, y_h, y_i, heads, chunk_start, chunk_stop, width, first_column, all_columns, slab_rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add ``xᵀ y`` to ``sums``: a window of positions of one head, over a slab of the chunk's queries.

    ``x`` is (batch · heads, chunk, width) in relative layout, ``sums`` (slabs, batch · heads, all_columns, D).
    """
    program, slab = tl.program_id(1).to(tl.int64), tl.program_id(2)
    columns = tl.program_id(0) * B + tl.arange(0, B)
    x += program * (chunk_stop - chunk_start) * width
    y += program // heads * y_b + program % heads * y_h
    total = tl.zeros((B, BLOCK_D), tl.float32)
    slab_stop = tl.minimum((slab + 1) * slab_rows, chunk_stop - chunk_start)
    for row in tl.range(slab * slab_rows, slab_stop, B):
        rows = row + tl.arange(0, B)
        here = rows < slab_stop
        tile = tl.load(x + rows.to(tl.int64)[:, None] * width + columns[None, :],
                       mask=here[:, None] & (columns < width)[None, :], other=0.0)  # fmt: skip
        total = tl.dot(tl.trans(tile), load_rows(y, chunk_start + rows, y_i, here, D, BLOCK_D), total,
                       input_precision=PRECISION)  # fmt: skip
    sums += (slab * tl.num_programs(1).to(tl.int64) + program) * all_columns * D
    total += load_rows(sums, first_column + columns, D, columns < width, D, BLOCK_D)
    store_rows(sums, first_column + columns, D, columns < width, total, D, BLOCK_D)
