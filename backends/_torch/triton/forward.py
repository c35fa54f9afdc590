"""Triton: attention on a GPU by fused kernels, forward and backward.

The kernels run compiled on CUDA tensors, and on CPU tensors in Triton's interpreter: the same code for both.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relskew_core._kernel.call import Operands, Options, shape_of_out, shape_of_sums
from relskew_core.backends._torch.triton.call import (
    Limits,
    Tile,
    TiledCall,
    block,
    decodes,
    decoding_tile,
    limits,
    on_device_of,
    widest,
)
from relskew_core.backends._torch.triton.kernels.decoding import Pages as InPages
from relskew_core.backends._torch.triton.kernels.decoding import decoding_kernel, merge_kernel
from relskew_core.backends._torch.triton.kernels.forward import forward_kernel
from relskew_core.backends._torch.triton.kernels.tiles import Rows


class Pages(NamedTuple):
    """Keys and values in the pages of a pool, and where those of each item are."""

    k: Tensor  # (P, page, Hkv, D)
    v: Tensor  # (P, page, Hkv, Dv)
    table: Tensor  # (B, n), integers
    lengths: Tensor  # (B,), integers
    reaches: bool = True  # whether tables have a row for every position; otherwise the others are NaN


ROWS = 64
"""The most rows of a tile of few queries."""


def attention(operands: Operands, options: Options, pages: Pages | None = None) -> tuple[Tensor, Tensor]:
    """Return the output (..., H, Lq, Dv) and the sums of weights (..., H, Lq, 2) in float32.

    The output is in the operands' dtype, that of a part of more in float32. With ``pages``, the keys and values are
    read there, and those of the operands only say how many an item may have.
    """
    call = TiledCall.of(operands, options)
    q = operands.q
    out = q.new_empty(shape_of_out(operands), dtype=torch.float32 if options.part.of_more else q.dtype)
    sums = q.new_empty(shape_of_sums(operands), dtype=torch.float32)
    if call.is_empty:
        return out.zero_(), sums.fill_(-math.inf)
    if pages is not None or decodes(operands, options):
        tile = decoding_tile(q.dtype, widest(operands), limits(q.device))
        kernel, (given, programs) = decoding_kernel, of_few(call, tile, pages)
    else:
        kernel, given = forward_kernel, call.arguments(call.forward)
        programs = -(-options.visibility.n_queries // call.forward.size), call.batch * call.heads
    size, n_keys = given["x"].B.value, options.visibility.n_keys
    key_tiles = -(-n_keys // size)
    keys_of_program = -(-key_tiles // runs(math.prod(programs), key_tiles, limits(q.device))) * size
    count = -(-n_keys // keys_of_program)
    parts = (out, sums)
    if count > 1:
        parts = (out.new_empty((count, *out.shape), dtype=torch.float32), sums.new_empty((count, *sums.shape)))
    with on_device_of(q):
        run = None if count == 1 and kernel is forward_kernel else keys_of_program
        kernel[(*programs, count)](out=parts[0], row_sums=parts[1], keys_of_program=run, **given)
        if count > 1:
            rows, width = math.prod(out.shape[:-1]), out.shape[-1]
            padded = {"BLOCK_DV": block(width), "COUNT": triton.next_power_of_2(count)}
            merge_kernel[rows,](*parts, out, sums, rows, count, DV=width, num_warps=8, **padded)
    return out, sums


def of_few(call: TiledCall, tile: Tile, pages: Pages | None) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return the arguments of the kernel for few queries, and its programs for each run of keys."""
    x, n = call.operands, call.options.visibility.n_queries
    key_heads = x.k.shape[1]
    group = call.heads // key_heads
    by_head = any(table is not None and table.ndim == 3 and len(table) > 1 for table in (x.rel_k, x.rel_v))
    rows = min(ROWS, tile.size, block(n * group))
    given = {"pages": None, **call.arguments(tile), "M": rows, "HEADS": group if by_head else 1, "ONE": n == 1,
             "REACHES": pages is None or pages.reaches}  # fmt: skip
    if pages is not None:
        k, v = (Rows(pool, 0, pool.stride(2), pool.stride(1)) for pool in (pages.k, pages.v))
        given["x"] = given["x"]._replace(k=k, v=v)
        given["pages"] = InPages(pages.table, pages.table.stride(0), pages.lengths, len(pages.k) - 1,
                                 pages.k.stride(0), pages.v.stride(0), tl.constexpr(pages.k.shape[1]))  # fmt: skip
    return given, (-(-n * group // rows), call.batch * key_heads)


FEWEST = 4
"""The fewest tiles of keys of a program where the keys of a query are divided among several."""

MOST = 128
"""The most programs that share the keys of a query, because one program merges their results."""


def runs(programs: int, tiles: int, device: Limits) -> int:
    """Return the number of programs that share the keys of a query, so that a few queries fill the device."""
    return max(1, min(2 * device.processors // programs, tiles // FEWEST, MOST))
