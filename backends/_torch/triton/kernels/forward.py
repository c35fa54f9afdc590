"""Triton: the forward kernel, FlashAttention with relative positions computed on the fly.

A program owns ``B`` queries of one head and goes over the keys in tiles of ``B``, in up to three parts: tiles wholly
before the band of positions that a clipped table distinguishes, tiles that overlap it, and tiles wholly after it.
Outside the band a query's relative term is one number. Inside, one product with ``B`` table rows a tile, the product of
the tile before, and one gather (:func:`skew`) make the term; values with relative positions take the same way back
(:func:`unskew`). Where positions are not consecutive, the windows are those of the rows that some pair of the tile has,
and each pair gathers its number (:func:`looked_up`).
"""

# Kernels are written in Triton's language, not Python's: they have no types, and constants are in capitals.
# mypy: ignore-errors
# pyright: basic, reportGeneralTypeIssues=false
# ruff: noqa: N806  # what is known when a kernel is compiled is in capitals

from __future__ import annotations

import triton
import triton.language as tl

from relskew_core.backends._torch.triton.kernels import tiles


@triton.jit(do_not_specialize=[*tiles.Numbers._fields, "keys_of_program"])
def forward_kernel(
    x, n_queries, n_keys, offset, lowest, highest, band_low, band_high, threshold,
    out, row_sums, keys_of_program,
):  # fmt: skip
    """Attend for ``B`` queries of one head, to all keys or to a run of ``keys_of_program`` of them, if not ``None``."""
    n = tiles.Numbers(n_queries, n_keys, offset, lowest, highest, band_low, band_high, threshold)
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * x.B  # with a causal pattern, the longest rows come first
    program = tl.program_id(1).to(tl.int64)
    b, h = program // x.heads, program % x.heads
    i = i0 + tl.arange(0, x.B)
    here = i < n.n_queries
    position = i0 + n.offset
    q_tile = tiles.load_rows(tiles.head_of(x.q, b, h), i, x.q.row, here, x.D, x.BLOCK_D)
    k, v = tiles.head_of(x.k, b, h // x.group), tiles.head_of(x.v, b, h // x.group)
    rel_q_tile = q_tile
    if x.rel_q is not None:
        rel_q_tile = tiles.load_rows(tiles.head_of(x.rel_q, b, h), i, x.rel_q.row, here, x.DR, x.BLOCK_DR)
    hashes = tiles.hashes_of(program, i, x, n)

    key_low, key_high, start, band_start, band_stop, stop = tiles.keys_of(i0, b, x, n)
    if keys_of_program is not None:  # its bounds may be within tiles, which takes registers
        start += tl.program_id(2) * keys_of_program
        end = start + keys_of_program
        band_start = tl.minimum(tl.maximum(band_start, start), end)
        band_stop = tl.minimum(tl.maximum(band_stop, start), end)
        stop = tl.minimum(tl.maximum(stop, start), end)
    largest = tl.full((x.B,), -float("inf"), tl.float32)
    total = tl.zeros((x.B,), tl.float32)
    sums = tl.zeros((x.B, x.BLOCK_DV), tl.float32)
    if x.rel_v is not None:
        waiting = tl.zeros((x.B, x.B), tl.float32)  # weights of the later window, to which the next tile adds
        far = tl.zeros((x.B,), tl.float32)  # weights beyond the edge of the part
    for PART in tl.static_range(x.FIRST_PART, x.LAST_PART + 1):
        part_start, part_stop = tiles.part_of(PART, start, band_start, band_stop, stop)
        if PART == 1 and x.q_positions is None:
            earlier = tiles.relative_window(rel_q_tile, x.rel_k, x.rel_bias, h, part_start - position - x.B,
                                            x.rel_scale, x, n, x.DR, x.BLOCK_DR)  # fmt: skip
        else:
            beyond = tiles.relative_edge(rel_q_tile, x.rel_k, x.rel_bias, h, x.rel_scale, x, PART, x.DR, x.BLOCK_DR)
            relative = beyond[:, None]
        for j0 in tl.range(part_start, part_stop, x.B):
            j = j0 + tl.arange(0, x.B)
            # Keys that no query of the tile sees are not loaded: a weight of zero does not hide NaN.
            seen = (j >= key_low) & (j < key_high)
            k_tile = tiles.load_rows(k, j, x.k.row, seen, x.D, x.BLOCK_D)
            row = tiles.rows_of_pairs(i0, j0, b, x, n)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=x.PRECISION) * x.scale
            if x.rel_k is not None or x.rel_bias is not None:
                if x.q_positions is not None:
                    s += tiles.looked_up(rel_q_tile, x.rel_k, x.rel_bias, h, row, x.rel_scale, x, x.DR, x.BLOCK_DR)
                elif PART == 1:
                    later = tiles.relative_window(rel_q_tile, x.rel_k, x.rel_bias, h, j0 - position, x.rel_scale,
                                                  x, n, x.DR, x.BLOCK_DR)  # fmt: skip
                    s += tiles.skew(earlier, later, x.B, x.SHUFFLES, x.rel_k is None)
                    earlier = later
                else:
                    s += relative
            s = tiles.with_key_table(s, k_tile, h, j0 - position, row, x, n, PART)
            s = tiles.masked(tiles.softcapped(s, x.softcap, x.SOFTCAP), row, i0, j0, b, h, x, n)

            grown = tl.maximum(largest, tl.max(s, 1))
            shift = tl.where(grown == -float("inf"), 0.0, grown) * tiles.LOG2E
            p = tl.exp2(s * tiles.LOG2E - shift[:, None])
            shrink = tl.exp2(largest * tiles.LOG2E - shift)
            total = total * shrink + tl.sum(p, 1)
            p = tiles.thinned(p, hashes, j0, x, n)
            largest = grown
            v_tile = tiles.load_rows(v, j, x.v.row, seen, x.DV, x.BLOCK_DV)
            if x.met_by_queries is not None:
                v_tile = tiles.weighed(v_tile, p)
            sums = sums * shrink[:, None]
            sums = tl.dot(p.to(v_tile.dtype), v_tile, sums, input_precision=x.PRECISION)
            if x.rel_v is not None:
                if x.q_positions is not None:
                    sums = tiles.looked_up_sums(sums, p, row, x.rel_v, h, None, i, here, x, x.DV, x.BLOCK_DV)
                elif PART == 1:
                    p_earlier, p_later = tiles.unskew(p, x.B, x.SHUFFLES)
                    window = tiles.load_window(x.rel_v, h, j0 - position - x.B, x, n, x.DV, x.BLOCK_DV)
                    p_earlier += waiting * shrink[:, None]
                    sums = tl.dot(p_earlier.to(window.dtype), window, sums, input_precision=x.PRECISION)
                    waiting = p_later
                elif x.EDGES:
                    far = far * shrink + tl.sum(p, 1)
        if x.rel_v is not None and x.q_positions is None:
            if PART == 1:
                ends = part_start + tl.maximum(part_stop - part_start - 1, 0) // x.B * x.B  # the last tile of the band
                window = tiles.load_window(x.rel_v, h, ends - position, x, n, x.DV, x.BLOCK_DV)
                sums = tl.dot(waiting.to(window.dtype), window, sums, input_precision=x.PRECISION)
            elif x.EDGES:
                last = 0 if PART == 0 else x.table_rows - 1
                edge = tiles.load_row(x.rel_v.at + h * x.rel_v.h + last * x.rel_v.row, x.DV, x.BLOCK_DV)
                sums += tl.where(far[:, None] > 0, far[:, None] * edge[None, :], 0.0)
                far = tl.zeros((x.B,), tl.float32)

    seen_some = tl.where(total == 0, 1.0, total)
    before = (tl.program_id(2) * tl.num_programs(1).to(tl.int64) + program) * n.n_queries
    tiles.store_rows(out + before * x.DV, i, x.DV, here, sums / seen_some[:, None], x.DV, x.BLOCK_DV)
    tl.store(row_sums + 2 * (before + i), largest, mask=here)
    tl.store(row_sums + 2 * (before + i) + 1, tl.log(seen_some), mask=here)
