"""Triton: attention on a GPU by fused kernels, forward and backward.

The kernels run compiled on CUDA tensors, and on CPU tensors in Triton's interpreter: the same code for both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relskew_core._kernel.call import Operands, Options, shape_of_out, shape_of_sums
from relskew_core.backends._torch.triton.call import Limits, TiledCall, limits, on_device_of
from relskew_core.backends._torch.triton.kernels.forward import forward_kernel


def attention(operands: Operands, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (..., H, Lq, Dv) and the sums of weights (..., H, Lq, 2) in float32.

    The output is in the operands' dtype, that of a part of more in float32.
    """
    call = TiledCall.of(operands, options)
    q = operands.q
    out = q.new_empty(shape_of_out(operands), dtype=torch.float32 if options.part.of_more else q.dtype)
    sums = q.new_empty(shape_of_sums(operands), dtype=torch.float32)
    if call.is_empty:
        return out.zero_(), sums.fill_(-math.inf)
    tile = call.forward
    tiles, programs = -(-options.visibility.n_queries // tile.size), call.batch * call.heads
    key_tiles = -(-options.visibility.n_keys // tile.size)
    keys_of_program = -(-key_tiles // runs(tiles * programs, key_tiles, limits(q.device))) * tile.size
    count = -(-options.visibility.n_keys // keys_of_program)
    parts = (out, sums)
    if count > 1:
        parts = tuple(x.new_empty((count, *x.shape), dtype=torch.float32) for x in parts)
    with on_device_of(q):
        given = {"out": parts[0], "row_sums": parts[1], "keys_of_program": keys_of_program if count > 1 else None}
        forward_kernel[tiles, programs, count](**given, **call.arguments(tile))
        return merged(*parts, out) if count > 1 else parts


FEWEST = 4
"""The fewest tiles of keys of a program where the keys of a query are divided among several."""


def runs(programs: int, tiles: int, device: Limits) -> int:
    """Return the number of programs that share the keys of a query, so that a few queries fill the device."""
    return max(1, min(2 * device.processors // programs, tiles // FEWEST))


def merged(outs: Tensor, sums: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Merge outputs (runs, …, Dv) and sums of weights (runs, …, 2) of disjoint keys, in a fixed order."""
    most = sums[..., 0].amax(0)
    weights = ((sums[..., 0] - torch.where(most == -math.inf, 0.0, most)) + sums[..., 1]).exp()
    total = weights.sum(0)
    total = torch.where(total == 0, 1.0, total)
    out = (weights[..., None] * outs).sum(0) / total[..., None]
    return out.to(like.dtype), torch.stack([most, total.log()], -1)
