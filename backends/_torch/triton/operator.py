"""Triton: the fused kernels as an operator, which saves its output and the log-sum-exp for the backward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relskew_core._array.softmax import share_of
from relskew_core._kernel.call import Gradients, Operands, Options
from relskew_core.backends._torch.operator import Operator
from relskew_core.backends._torch.triton import backward, forward

OPERATOR = Operator("fused_attention", forward.attention, backward.attention_vjp, keeps=True)


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if requested, the log-sum-exp."""
    return OPERATOR(operands, options)


def attention_vjp(
    d_out: Tensor, operands: Operands, options: Options, *, out: Tensor | None, lse: Tensor | None, xp: Any, **more: Any
) -> Gradients:
    """Return the gradients of every operand; missing results of the forward pass are computed again."""
    if out is None or lse is None:
        made, sums = forward.attention(operands, options)
        if out is None:
            out = made if lse is None else made * share_of(sums, lse, xp=xp)[..., None]
        lse = sums if lse is None else lse
    return backward.attention_vjp(d_out, operands, options, out=out, lse=lse, **more)
