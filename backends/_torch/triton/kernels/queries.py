"""Triton: the backward kernels for the queries. Every program writes to separate memory, without atomics.

``dS = P ∘ (dO · (V + EV) - Δ)``, with the weights ``P`` made anew from their sums. Where a tile's ``dS`` is turned
into its two windows of relative positions (:func:`unskew`), the earlier window is complete: it is multiplied by the
table rows for the gradient of the queries, and is stored for the table's.
"""

# Kernels are written in Triton's language, not Python's: they have no types, and constants are in capitals.
# mypy: ignore-errors
# pyright: basic, reportGeneralTypeIssues=false
# ruff: noqa: N803, N806  # what is known when a kernel is compiled is in capitals

from __future__ import annotations

import triton
import triton.language as tl

from relskew_core.backends._torch.triton.kernels import tiles


@triton.jit
def tile_gradient(
    q_tile, rel_q_tile, do, k_tile, v_tile, edge, v_edge, most, log, delta, hashes, row, i0, j0, b, h, x, n,
    PART: tl.constexpr,
):  # fmt: skip
    """Return a tile's weights, and the gradients of its logits, for the mask and before the softcap."""
    first = j0 - i0 - n.offset
    s = tiles.product(q_tile, k_tile, x.scale, rel_q_tile, x.rel_k, x.rel_bias, h, first, x.rel_scale, edge, row, x, n,
                      PART, x.DR, x.BLOCK_DR)  # fmt: skip
    s = tiles.with_key_table(s, k_tile, h, first, row, x, n, PART)
    dp = tiles.product(do, v_tile, 1.0, do, x.rel_v, None, h, first, 1.0, v_edge, row, x, n, PART, x.DV, x.BLOCK_DV)
    capped = tiles.softcapped(s, x.softcap, x.SOFTCAP)
    logits = tiles.masked(capped, row, i0, j0, b, h, x, n)
    unseen = logits == -float("inf")  # products with hidden keys may be NaN
    p = tl.where(unseen, 0.0, tl.exp2((logits - most[:, None] - log[:, None]) * tiles.LOG2E))
    ds = tl.where(unseen, 0.0, p * (tiles.thinned(dp, hashes, j0, x, n) - delta[:, None]))
    before_cap = ds
    if x.SOFTCAP:
        ratio = capped / x.softcap
        before_cap = tl.where(unseen, 0.0, ds * (1.0 - ratio * ratio))
    return tiles.thinned(p, hashes, j0, x, n), ds, before_cap


@triton.jit
def add_window(
    sums, window, table, h, first, buffer, lines, column, here, width, x, n,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Store a complete window of positions, the lowest of which is ``first``, and add its products with the table."""
    if buffer is not None:
        store_window(buffer, width, lines, column, window, here, width, x.B)
    if table is not None:
        rows = tiles.load_window(table, h, first, x, n, WIDTH, BLOCK, SIGN)
        sums = tl.dot(window, rows, sums, input_precision=x.PRECISION)
    return sums


@triton.jit
def add_tile(
    sums, waiting, far, y, row, table, h, first, buffer, lines, here, first_position, width, x, n,
    PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIGN: tl.constexpr = 1,
):  # fmt: skip
    """Add the numbers ``y`` of a tile's pairs, in absolute layout, times the table's rows of their positions.

    ``waiting`` is the later window, which the next tile completes, and ``far`` the sums beyond the band.
    """
    if x.q_positions is not None:
        sums = tiles.looked_up_sums(sums, y, row, table, h, buffer, lines, here, x, WIDTH, BLOCK)
    elif PART == 1:
        window, later = tiles.unskew(y, x.B, x.SHUFFLES and SIGN == 1)  # a turned tile has another layout
        window = window.to(waiting.dtype) + waiting
        waiting = later.to(waiting.dtype)
        sums = add_window(sums, window, table, h, first - x.B, buffer, lines, first - x.B - first_position, here,
                          width, x, n, WIDTH, BLOCK, SIGN)  # fmt: skip
    else:
        far += tl.sum(y, 1)
    return sums, waiting, far


@triton.jit
def end_part(
    sums, waiting, far, table, h, first, buffer, far_buffer, lines, line, here, first_position, width, some, x, n,
    PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIGN: tl.constexpr = 1,
):  # fmt: skip
    """Add what waits after a part's last tile, whose lowest position is ``first``, or the sums beyond the band."""
    if x.q_positions is None:
        if PART == 1:
            if some:
                sums = add_window(sums, waiting, table, h, first, buffer, lines, first - first_position, here,
                                  width, x, n, WIDTH, BLOCK, SIGN)  # fmt: skip
        elif x.EDGES:
            if table is not None:
                edge = 0 if PART == 0 else x.table_rows - 1
                rows = tiles.load_row(table.at + h * table.h + edge * table.row, WIDTH, BLOCK)[None, :]
                sums += tl.where(far[:, None] != 0, far[:, None] * rows, 0.0)
            if buffer is not None:
                tl.store(far_buffer + line, far, mask=here)
    return sums


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
    d_out_tile = tiles.load_rows(d_out + first * DV, row, DV, here, DV, BLOCK_DV).to(tl.float32)
    x = tl.sum(d_out_tile * tiles.load_rows(out + first * DV, row, DV, here, DV, BLOCK_DV).to(tl.float32), 1)
    if D_LSE:
        x -= tl.load(d_lse + first + row, mask=here, other=0.0)
    tl.store(delta + first + row, x, mask=here)


@triton.jit(do_not_specialize=[*tiles.Numbers._fields])
def query_gradient_kernel(
    x, n_queries, n_keys, offset, lowest, highest, band_low, band_high, threshold,
    d_out, row_sums, delta, d_q, d_rel_q, d_mask, d_logits, weights, far_logits, far_weights,
    chunk_start, chunk_stop, first_position, width,
):  # fmt: skip
    """Compute the gradient of ``B`` queries, and store their gradients of logits in relative layout.

    ``x.APART`` says that the products with keys and with the table have separate sums, because their scales differ or
    because they are gradients of two arrays.

    ``d_logits`` and ``weights`` are (batch · heads, chunk, width), column ``c`` for the position
    ``first_position + c``, or for the table's row ``c`` where positions are not consecutive; ``far_logits`` and
    ``far_weights`` are (2, batch · heads, n_queries), the sums before and after the band.
    """
    n = tiles.Numbers(n_queries, n_keys, offset, lowest, highest, band_low, band_high, threshold)
    i0 = chunk_start + (tl.num_programs(0) - 1 - tl.program_id(0)) * x.B
    program = tl.program_id(1).to(tl.int64)
    b, h = program // x.heads, program % x.heads
    i = i0 + tl.arange(0, x.B)
    here = i < chunk_stop
    line = i - chunk_start
    position = i0 + n.offset
    q_tile = tiles.load_rows(tiles.head_of(x.q, b, h), i, x.q.row, here, x.D, x.BLOCK_D)
    do = tiles.load_rows(d_out + program * n.n_queries * x.DV, i, x.DV, here, x.DV, x.BLOCK_DV)
    most, log = load_sums(row_sums + 2 * program * n.n_queries, i, here)
    delta_row = tl.load(delta + program * n.n_queries + i, mask=here, other=0.0)
    hashes = tiles.hashes_of(program, i, x, n)
    k, v = tiles.head_of(x.k, b, h // x.group), tiles.head_of(x.v, b, h // x.group)
    rel_q_tile = q_tile
    if x.rel_q is not None:
        rel_q_tile = tiles.load_rows(tiles.head_of(x.rel_q, b, h), i, x.rel_q.row, here, x.DR, x.BLOCK_DR)
    before_chunk = program * (chunk_stop - chunk_start)
    if d_logits is not None:
        d_logits += before_chunk * width
    if weights is not None:
        weights += before_chunk * width
    if d_mask is not None:
        d_mask += before_chunk * n.n_keys

    key_low, key_high, start, band_start, band_stop, stop = tiles.keys_of(i0, b, x, n)
    sums = tl.zeros((x.B, x.BLOCK_D), tl.float32)
    rel_sums = sums
    if x.APART:
        rel_sums = tl.zeros((x.B, x.BLOCK_DR), tl.float32)
    for PART in tl.static_range(x.FIRST_PART, x.LAST_PART + 1):
        part_start, part_stop = tiles.part_of(PART, start, band_start, band_stop, stop)
        relative = tiles.relative_edge(rel_q_tile, x.rel_k, x.rel_bias, h, x.rel_scale, x, PART, x.DR, x.BLOCK_DR)
        v_relative = tiles.relative_edge(do, x.rel_v, None, h, 1.0, x, PART, x.DV, x.BLOCK_DV)
        # of the later window, which the next tile completes: a number is of one of the two, so rounding is as late
        waiting = tl.zeros((x.B, x.B), q_tile.dtype)
        far, p_waiting, p_far = tl.zeros((x.B,), tl.float32), waiting, tl.zeros((x.B,), tl.float32)
        for j0 in tl.range(part_start, part_stop, x.B):
            j = j0 + tl.arange(0, x.B)
            seen = (j >= key_low) & (j < key_high)
            k_tile = tiles.load_rows(k, j, x.k.row, seen, x.D, x.BLOCK_D)
            v_tile = tiles.load_rows(v, j, x.v.row, seen, x.DV, x.BLOCK_DV)
            row = tiles.rows_of_pairs(i0, j0, b, x, n)
            p, ds_mask, ds = tile_gradient(q_tile, rel_q_tile, do, k_tile, v_tile, relative, v_relative, most, log,
                                           delta_row, hashes, row, i0, j0, b, h, x, n, PART)  # fmt: skip
            if d_mask is not None:
                store_window(d_mask, n.n_keys, line, j0, ds_mask.to(d_mask.dtype.element_ty), here, n.n_keys, x.B)
            if x.met_by_queries is not None:
                k_tile = tiles.weighed(k_tile, ds)
            sums = tl.dot(ds.to(k_tile.dtype), k_tile, sums, input_precision=x.PRECISION)
            if x.rel_k is not None or x.rel_bias is not None:
                if not x.APART:
                    rel_sums = sums
                rel_sums, waiting, far = add_tile(
                    rel_sums, waiting, far, ds, row, x.rel_k, h, j0 - position, d_logits, line, here, first_position,
                    width, x, n, PART, x.DR, x.BLOCK_DR)  # fmt: skip
                if not x.APART:
                    sums = rel_sums
            if weights is not None:
                _, p_waiting, p_far = add_tile(
                    sums, p_waiting, p_far, p, row, None, h, j0 - position, weights, line, here, first_position,
                    width, x, n, PART, x.DV, x.BLOCK_DV)  # fmt: skip
        first = part_start - position + (part_stop - part_start - 1) // x.B * x.B  # of the last tile
        place = ((0 if PART == 0 else 1) * tl.num_programs(1).to(tl.int64) + program) * n.n_queries + i
        some = part_stop > part_start
        if x.rel_k is not None or x.rel_bias is not None:
            if not x.APART:
                rel_sums = sums
            rel_sums = end_part(rel_sums, waiting, far, x.rel_k, h, first, d_logits, far_logits, line, place, here,
                                first_position, width, some, x, n, PART, x.DR, x.BLOCK_DR)  # fmt: skip
            if not x.APART:
                sums = rel_sums
        if weights is not None:
            end_part(sums, p_waiting, p_far, None, h, first, weights, far_weights, line, place, here,
                     first_position, width, some, x, n, PART, x.DV, x.BLOCK_DV)  # fmt: skip

    sums *= x.scale
    if x.APART:
        rel_sums *= x.rel_scale
        if x.rel_q is not None:
            tiles.store_rows(d_rel_q + program * n.n_queries * x.DR, i, x.DR, here, rel_sums, x.DR, x.BLOCK_DR)
        else:
            sums += rel_sums
    tiles.store_rows(d_q + program * n.n_queries * x.D, i, x.D, here, sums, x.D, x.BLOCK_D)
