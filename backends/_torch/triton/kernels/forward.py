"""Triton: the forward kernel, FlashAttention with relative positions computed on the fly.

A program owns ``B`` queries of one head and goes over the keys in tiles of ``B``, in up to three parts: tiles wholly
before the band of positions that a clipped table distinguishes, tiles that overlap it, and tiles wholly after it.
Outside the band a query's relative term is one number. Inside, one product with ``B`` table rows a tile, the product of
the tile before, and one gather (:func:`skew`) make the term; values with relative positions take the same way back
(:func:`unskew`).
"""

# Kernels are written in Triton's language, not Python's: they have no types, and constants are in capitals.
# mypy: ignore-errors
# pyright: basic, reportGeneralTypeIssues=false
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from relskew_core.backends._torch.triton.kernels.tiles import (
    LOG2E,
    keys_of,
    load_row,
    load_rows,
    load_window,
    masked,
    relative_edge,
    relative_window,
    skew,
    softcapped,
    store_rows,
    unskew,
)


@triton.jit(do_not_specialize=["n_queries", "n_keys", "offset", "lowest", "highest", "band_low", "band_high"])
def forward_kernel(
    q, k, v, rel_q, rel_k, rel_v, rel_bias, mask, out, row_sums,
    q_b, q_h, q_i, k_b, k_h, k_j, v_b, v_h, v_j, rel_q_b, rel_q_h, rel_q_i,
    rel_k_h, rel_k_r, rel_v_h, rel_v_r, rel_bias_h, mask_b, mask_h, mask_i, mask_j,
    heads, group, n_queries, n_keys, offset, before, after, block_size,
    span_left, table_rows, lowest, highest, band_low, band_high, scale, rel_scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_DR: tl.constexpr, B: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, LOCAL: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    REL_K: tl.constexpr, REL_Q: tl.constexpr, REL_V: tl.constexpr, REL_BIAS: tl.constexpr,
    FIRST_PART: tl.constexpr, LAST_PART: tl.constexpr, EDGES: tl.constexpr, PRECISION: tl.constexpr,
    SHUFFLES: tl.constexpr,
):  # fmt: skip
    """Attend for ``B`` queries of one head."""
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * B  # with a causal pattern, the longest rows come first
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    i = i0 + tl.arange(0, B)
    here = i < n_queries
    position = i0 + offset
    q_tile = load_rows(q + b * q_b + h * q_h, i, q_i, here, D, BLOCK_D)
    k += b * k_b + h // group * k_h
    v += b * v_b + h // group * v_h
    rel_q_tile = q_tile
    if REL_Q:
        rel_q_tile = load_rows(rel_q + b * rel_q_b + h * rel_q_h, i, rel_q_i, here, DR, BLOCK_DR)
    if REL_K:
        rel_k += h * rel_k_h
    if REL_V:
        rel_v += h * rel_v_h
    if REL_BIAS:
        rel_bias += h * rel_bias_h
    if MASK:
        mask += b * mask_b + h * mask_h

    key_low, key_high, start, band_start, band_stop, stop = keys_of(
        i0, n_queries, n_keys, offset, before, after, block_size, band_low, band_high,
        BEFORE, AFTER, LOCAL, FIRST_PART, LAST_PART, B)  # fmt: skip
    largest = tl.full((B,), -float("inf"), tl.float32)
    total = tl.zeros((B,), tl.float32)
    sums = tl.zeros((B, BLOCK_DV), tl.float32)
    if REL_V:
        waiting = tl.zeros((B, B), tl.float32)  # weights of the later window, to which the next tile adds
        far = tl.zeros((B,), tl.float32)  # weights beyond the edge of the part
    for PART in tl.static_range(FIRST_PART, LAST_PART + 1):
        if PART == 0:
            part_start, part_stop = start, band_start
            relative = relative_edge(rel_q_tile, rel_k, rel_k_r, rel_bias, 0, rel_scale,
                                     DR, BLOCK_DR, B, REL_K, REL_BIAS, EDGES)[:, None]  # fmt: skip
        elif PART == 1:
            part_start, part_stop = band_start, band_stop
            earlier = relative_window(rel_q_tile, rel_k, rel_k_r, rel_bias, part_start - position - B, span_left,
                                      table_rows, lowest, highest, rel_scale,
                                      DR, BLOCK_DR, B, REL_K, REL_BIAS, PRECISION)  # fmt: skip
        else:
            part_start, part_stop = band_stop, stop
            relative = relative_edge(rel_q_tile, rel_k, rel_k_r, rel_bias, table_rows - 1, rel_scale,
                                     DR, BLOCK_DR, B, REL_K, REL_BIAS, EDGES)[:, None]  # fmt: skip
        for j0 in tl.range(part_start, part_stop, B):
            j = j0 + tl.arange(0, B)
            # Keys that no query of the tile sees are not loaded: a weight of zero does not hide NaN.
            seen = (j >= key_low) & (j < key_high)
            k_tile = load_rows(k, j, k_j, seen, D, BLOCK_D)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
            if REL_K or REL_BIAS:
                if PART == 1:
                    later = relative_window(rel_q_tile, rel_k, rel_k_r, rel_bias, j0 - position, span_left, table_rows,
                                            lowest, highest, rel_scale,
                                            DR, BLOCK_DR, B, REL_K, REL_BIAS, PRECISION)  # fmt: skip
                    s += skew(earlier, later, B, SHUFFLES, not REL_K)
                    earlier = later
                else:
                    s += relative
            s = masked(softcapped(s, softcap, SOFTCAP), i0, j0, mask, mask_i, mask_j, n_queries, n_keys, offset,
                       before, after, block_size, BEFORE, AFTER, LOCAL, MASK, B)  # fmt: skip

            grown = tl.maximum(largest, tl.max(s, 1))
            shift = tl.where(grown == -float("inf"), 0.0, grown) * LOG2E
            p = tl.exp2(s * LOG2E - shift[:, None])
            shrink = tl.exp2(largest * LOG2E - shift)
            total = total * shrink + tl.sum(p, 1)
            largest = grown
            v_tile = load_rows(v, j, v_j, seen, DV, BLOCK_DV)
            sums = sums * shrink[:, None]
            sums = tl.dot(p.to(v_tile.dtype), v_tile, sums, input_precision=PRECISION)
            if REL_V:
                if PART == 1:
                    p_earlier, p_later = unskew(p, B, SHUFFLES)
                    window = load_window(rel_v, rel_v_r, j0 - position - B, span_left, table_rows, lowest, highest,
                                         DV, BLOCK_DV, B)  # fmt: skip
                    p_earlier += waiting * shrink[:, None]
                    sums = tl.dot(p_earlier.to(window.dtype), window, sums, input_precision=PRECISION)
                    waiting = p_later
                elif EDGES:
                    far = far * shrink + tl.sum(p, 1)
        if REL_V:
            if PART == 1:
                ends = part_start + tl.maximum(part_stop - part_start - 1, 0) // B * B  # the last tile of the band
                window = load_window(rel_v, rel_v_r, ends - position, span_left, table_rows, lowest, highest,
                                     DV, BLOCK_DV, B)  # fmt: skip
                sums = tl.dot(waiting.to(window.dtype), window, sums, input_precision=PRECISION)
            elif EDGES:
                edge = load_row(rel_v + (0 if PART == 0 else table_rows - 1) * rel_v_r, DV, BLOCK_DV)
                sums += tl.where(far[:, None] > 0, far[:, None] * edge[None, :], 0.0)
                far = tl.zeros((B,), tl.float32)

    seen_some = tl.where(total == 0, 1.0, total)
    row = tl.program_id(1).to(tl.int64) * n_queries
    store_rows(out + row * DV, i, DV, here, sums / seen_some[:, None], DV, BLOCK_DV)
    tl.store(row_sums + 2 * (row + i), largest, mask=here)
    tl.store(row_sums + 2 * (row + i) + 1, tl.log(seen_some), mask=here)
