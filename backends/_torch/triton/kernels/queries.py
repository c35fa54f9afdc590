"""Triton: the backward kernels for the queries. Every program writes to separate memory, without atomics.

``dS = P ∘ (dO · (V + EV) - Δ)``, with the weights ``P`` made anew from their sums. Where a tile's ``dS`` is turned
into its two windows of relative positions (:func:`unskew`), the earlier window is complete: it is multiplied by the
table rows for the gradient of the queries, and is stored for the table's.
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


@triton.jit
def tile_gradient(
    s, dp, most, log, delta, i0, j0, mask, mask_i, mask_j, n_queries, n_keys, offset, before, after, block_size,
    softcap,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, LOCAL: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Return a tile's weights, and the gradients of its logits, for the mask and before the softcap."""
    capped = softcapped(s, softcap, SOFTCAP)
    logits = masked(capped, i0, j0, mask, mask_i, mask_j, n_queries, n_keys, offset, before, after, block_size,
                    BEFORE, AFTER, LOCAL, MASK, B)  # fmt: skip
    unseen = logits == -float("inf")  # products with hidden keys may be NaN
    p = tl.where(unseen, 0.0, tl.exp2((logits - most[:, None] - log[:, None]) * LOG2E))
    ds = tl.where(unseen, 0.0, p * (dp - delta[:, None]))
    before_cap = ds
    if SOFTCAP:
        ratio = capped / softcap
        before_cap = tl.where(unseen, 0.0, ds * (1.0 - ratio * ratio))
    return p, ds, before_cap


@triton.jit
def load_sums(row_sums, i, here):
    """Load the largest logit of each query and the logarithm of its weights' sum."""
    most = tl.load(row_sums + 2 * i, mask=here, other=float("inf"))
    seen = most != -float("inf")  # weights of queries that see nothing are zero
    log = tl.load(row_sums + 2 * i + 1, mask=here & seen, other=0.0)
    return tl.where(seen, most, float("inf")), log


@triton.jit
def store_window(base, row_stride, rows, column, x, seen, width, B: tl.constexpr):
    """Store a window of positions, (B, B), at a column of the chunk's relative layout."""
    columns = column + tl.arange(0, B)
    keep = seen[:, None] & ((columns >= 0) & (columns < width))[None, :]
    tl.store(base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :], x, mask=keep)


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(
    d_out, out, d_lse, delta, rows, DV: tl.constexpr, BLOCK_DV: tl.constexpr, B: tl.constexpr, D_LSE: tl.constexpr
):  # fmt: skip
    """Compute what a query's gradients of logits lose per weight: ``d_out · out``, less its ``d_lse``."""
    first = tl.program_id(0).to(tl.int64) * B
    row = tl.arange(0, B)
    here = first + row < rows
    d_out_tile = load_rows(d_out + first * DV, row, DV, here, DV, BLOCK_DV).to(tl.float32)
    x = tl.sum(d_out_tile * load_rows(out + first * DV, row, DV, here, DV, BLOCK_DV).to(tl.float32), 1)
    if D_LSE:
        x -= tl.load(d_lse + first + row, mask=here, other=0.0)
    tl.store(delta + first + row, x, mask=here)


@triton.jit(do_not_specialize=["n_queries", "n_keys", "offset", "lowest", "highest", "band_low", "band_high"])
def query_gradient_kernel(
    q, k, v, rel_q, rel_k, rel_v, rel_bias, mask,
    q_b, q_h, q_i, k_b, k_h, k_j, v_b, v_h, v_j, rel_q_b, rel_q_h, rel_q_i,
    rel_k_h, rel_k_r, rel_v_h, rel_v_r, rel_bias_h, mask_b, mask_h, mask_i, mask_j,
    heads, group, n_queries, n_keys, offset, before, after, block_size,
    span_left, table_rows, lowest, highest, band_low, band_high, scale, rel_scale, softcap,
    d_out, row_sums, delta, d_q, d_rel_q, d_mask, d_logits, weights, far_logits, far_weights,
    chunk_start, chunk_stop, first_position, width,
    D: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_DR: tl.constexpr, B: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, LOCAL: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    REL_K: tl.constexpr, REL_Q: tl.constexpr, REL_V: tl.constexpr, REL_BIAS: tl.constexpr,
    FIRST_PART: tl.constexpr, LAST_PART: tl.constexpr, EDGES: tl.constexpr, PRECISION: tl.constexpr,
    SHUFFLES: tl.constexpr, KEEP_LOGITS: tl.constexpr, KEEP_WEIGHTS: tl.constexpr, KEEP_MASK: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ``B`` queries, and store their gradients of logits in relative layout.

    ``APART`` says that the products with keys and with the table have separate sums, because their scales differ or
    because they are gradients of two arrays.

    ``d_logits`` and ``weights`` are (batch · heads, chunk, width), column ``c`` for the position
    ``first_position + c``; ``far_logits`` and ``far_weights`` are (2, batch · heads, n_queries), the sums before and
    after the band.
    """
    i0 = chunk_start + (tl.num_programs(0) - 1 - tl.program_id(0)) * B
    program = tl.program_id(1).to(tl.int64)
    b, h = program // heads, program % heads
    i = i0 + tl.arange(0, B)
    here = i < chunk_stop
    row = i - chunk_start
    position = i0 + offset
    q_tile = load_rows(q + b * q_b + h * q_h, i, q_i, here, D, BLOCK_D)
    do = load_rows(d_out + program * n_queries * DV, i, DV, here, DV, BLOCK_DV)
    most, log = load_sums(row_sums + 2 * program * n_queries, i, here)
    delta_row = tl.load(delta + program * n_queries + i, mask=here, other=0.0)
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
    if KEEP_LOGITS:
        d_logits += program * (chunk_stop - chunk_start) * width
    if KEEP_WEIGHTS:
        weights += program * (chunk_stop - chunk_start) * width
    if KEEP_MASK:
        d_mask += program * (chunk_stop - chunk_start) * n_keys

    key_low, key_high, start, band_start, band_stop, stop = keys_of(
        i0, n_queries, n_keys, offset, before, after, block_size, band_low, band_high,
        BEFORE, AFTER, LOCAL, FIRST_PART, LAST_PART, B)  # fmt: skip
    sums = tl.zeros((B, BLOCK_D), tl.float32)
    if APART:
        rel_sums = tl.zeros((B, BLOCK_DR), tl.float32)
    for PART in tl.static_range(FIRST_PART, LAST_PART + 1):
        if PART == 1:
            part_start, part_stop = band_start, band_stop
            first = part_start - position
            if REL_K or REL_BIAS:
                earlier = relative_window(rel_q_tile, rel_k, rel_k_r, rel_bias, first - B, span_left, table_rows,
                                          lowest, highest, rel_scale,
                                          DR, BLOCK_DR, B, REL_K, REL_BIAS, PRECISION)  # fmt: skip
                waiting = tl.zeros((B, B), tl.float32)  # of the later window, to which the next tile adds
            if REL_V:
                v_earlier = relative_window(do, rel_v, rel_v_r, rel_v, first - B, span_left, table_rows,
                                            lowest, highest, 1.0, DV, BLOCK_DV, B, True, False, PRECISION)  # fmt: skip
                if KEEP_WEIGHTS:
                    p_waiting = tl.zeros((B, B), tl.float32)
        else:
            part_start, part_stop = (start, band_start) if PART == 0 else (band_stop, stop)
            edge = 0 if PART == 0 else table_rows - 1
            if REL_K or REL_BIAS:
                relative = relative_edge(rel_q_tile, rel_k, rel_k_r, rel_bias, edge, rel_scale,
                                         DR, BLOCK_DR, B, REL_K, REL_BIAS, EDGES)[:, None]  # fmt: skip
            if REL_V:
                v_relative = relative_edge(do, rel_v, rel_v_r, rel_v, edge, 1.0,
                                           DV, BLOCK_DV, B, True, False, EDGES)[:, None]  # fmt: skip
            far, p_far = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
        for j0 in tl.range(part_start, part_stop, B):
            j = j0 + tl.arange(0, B)
            seen = (j >= key_low) & (j < key_high)
            k_tile = load_rows(k, j, k_j, seen, D, BLOCK_D)
            v_tile = load_rows(v, j, v_j, seen, DV, BLOCK_DV)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
            if PART == 1:
                if REL_K or REL_BIAS:
                    later = relative_window(rel_q_tile, rel_k, rel_k_r, rel_bias, j0 - position, span_left, table_rows,
                                            lowest, highest, rel_scale,
                                            DR, BLOCK_DR, B, REL_K, REL_BIAS, PRECISION)  # fmt: skip
                    s += skew(earlier, later, B, SHUFFLES, not REL_K)
                    earlier = later
            elif REL_K or REL_BIAS:
                s += relative
            dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)  # last, because registers are few
            if PART == 1:
                if REL_V:
                    v_later = relative_window(do, rel_v, rel_v_r, rel_v, j0 - position, span_left, table_rows,
                                              lowest, highest, 1.0,
                                              DV, BLOCK_DV, B, True, False, PRECISION)  # fmt: skip
                    dp += skew(v_earlier, v_later, B, SHUFFLES, False)
                    v_earlier = v_later
            elif REL_V:
                dp += v_relative
            p, ds_mask, ds = tile_gradient(
                s, dp, most, log, delta_row, i0, j0, mask, mask_i, mask_j, n_queries, n_keys, offset, before, after,
                block_size, softcap, BEFORE, AFTER, LOCAL, MASK, SOFTCAP, B)  # fmt: skip
            if KEEP_MASK:
                store_window(d_mask, n_keys, row, j0, ds_mask.to(d_mask.dtype.element_ty), here, n_keys, B)
            sums = tl.dot(ds.to(k_tile.dtype), k_tile, sums, input_precision=PRECISION)
            if PART == 1:
                first = j0 - position - B
                if REL_K or REL_BIAS:
                    window, ds_later = unskew(ds, B, SHUFFLES)
                    window = (window + waiting).to(k_tile.dtype)
                    waiting = ds_later
                    if KEEP_LOGITS:
                        store_window(d_logits, width, row, first - first_position, window, here, width, B)
                    if REL_K:
                        rows = load_window(rel_k, rel_k_r, first, span_left, table_rows, lowest, highest,
                                           DR, BLOCK_DR, B)  # fmt: skip
                        if APART:
                            rel_sums = tl.dot(window, rows, rel_sums, input_precision=PRECISION)
                        else:
                            sums = tl.dot(window, rows, sums, input_precision=PRECISION)
                if KEEP_WEIGHTS:
                    p_window, p_later = unskew(p, B, SHUFFLES)
                    p_window = (p_window + p_waiting).to(v_tile.dtype)
                    p_waiting = p_later
                    store_window(weights, width, row, first - first_position, p_window, here, width, B)
            else:
                far += tl.sum(ds, 1)
                p_far += tl.sum(p, 1)
        if PART == 1:
            first = part_start - position + tl.maximum(part_stop - part_start - 1, 0) // B * B  # of the last tile
            if part_stop > part_start:
                if REL_K or REL_BIAS:
                    window = waiting.to(q_tile.dtype)
                    if KEEP_LOGITS:
                        store_window(d_logits, width, row, first - first_position, window, here, width, B)
                    if REL_K:
                        rows = load_window(rel_k, rel_k_r, first, span_left, table_rows, lowest, highest,
                                           DR, BLOCK_DR, B)  # fmt: skip
                        if APART:
                            rel_sums = tl.dot(window, rows, rel_sums, input_precision=PRECISION)
                        else:
                            sums = tl.dot(window, rows, sums, input_precision=PRECISION)
                if KEEP_WEIGHTS:
                    store_window(weights, width, row, first - first_position, p_waiting.to(do.dtype), here, width, B)
        elif EDGES:
            programs = tl.num_programs(1).to(tl.int64)
            place = ((0 if PART == 0 else 1) * programs + program) * n_queries + i
            if REL_K:
                row_of_table = load_row(rel_k + edge * rel_k_r, DR, BLOCK_DR)[None, :]
                far_sums = tl.where(far[:, None] != 0, far[:, None] * row_of_table, 0.0)
                if APART:
                    rel_sums += far_sums
                else:
                    sums += far_sums
            if KEEP_LOGITS:
                tl.store(far_logits + place, far, mask=here)
            if KEEP_WEIGHTS:
                tl.store(far_weights + place, p_far, mask=here)

    sums *= scale
    if APART:
        rel_sums *= rel_scale
        if REL_Q:
            store_rows(d_rel_q + program * n_queries * DR, i, DR, here, rel_sums, DR, BLOCK_DR)
        else:
            sums += rel_sums
    store_rows(d_q + program * n_queries * D, i, D, here, sums, D, BLOCK_D)
