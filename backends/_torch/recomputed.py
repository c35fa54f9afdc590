"""torch: the portable kernels as one operator, which saves only its inputs and recomputes the rest.

For long calls that no other path serves: left to autograd, every chunk's weights would stay until the backward pass.
"""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._kernel import backward, forward
from relskew_core._kernel.call import Gradients, Operands, Options
from relskew_core.backends._torch.operator import Operator


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if requested, the sums of weights."""
    return OPERATOR(operands, options)


def attention_vjp(d_out: Tensor, operands: Operands, options: Options, *, xp: Any, **results: Any) -> Gradients:
    """Return the gradients of every operand."""
    return backward.attention_vjp(d_out, operands, options, xp=xp, **results)


def _attend(operands: Operands, options: Options) -> tuple[Tensor, Tensor | None]:
    with torch.no_grad(), torch.autocast(operands.q.device.type, enabled=False):
        return forward.attention(operands, options, xp=xp)


def _pull_back(d_out: Tensor, operands: Operands, options: Options, *, wanted: Any, **results: Any) -> Gradients:
    with torch.no_grad(), torch.autocast(operands.q.device.type, enabled=False):
        return backward.attention_vjp(d_out, operands, options, xp=xp, **results)


OPERATOR = Operator("recomputed_attention", _attend, _pull_back)
