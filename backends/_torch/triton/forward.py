"""Triton: attention on a GPU by fused kernels, forward and backward.

The kernels run compiled on CUDA tensors, and on CPU tensors in Triton's interpreter: the same code for both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relskew_core._kernel.call import Operands, Options, shape_of_out, shape_of_rows
from relskew_core.backends._torch.triton.call import TiledCall, on_device_of
from relskew_core.backends._torch.triton.kernels.forward import forward_kernel


def attention(operands: Operands, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (..., H, Lq, Dv) and the sums of weights (..., H, Lq, 2) in float32.

    The output is in the operands' dtype, that of a part of more in float32.
    """
    call = TiledCall.of(operands, options)
    q = operands.q
    shape = shape_of_rows(operands)
    out = q.new_empty(shape_of_out(operands), dtype=torch.float32 if options.part.of_more else q.dtype)
    sums = q.new_empty((*shape, 2), dtype=torch.float32)
    if math.prod(shape) == 0 or options.visibility.positions() is None:
        return out.zero_(), sums.fill_(-math.inf)
    tile = call.forward
    grid = (-(-options.visibility.n_queries // tile.size), call.batch * call.heads)
    with on_device_of(q):
        forward_kernel[grid](out=out, row_sums=sums, **call.arguments(tile))
    return out, sums
