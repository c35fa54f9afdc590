"""Triton: the fused kernels as an operator, which saves its output and the sums of weights for the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import array_api_compat.torch as of_torch
from torch import Tensor

from relskew_core._kernel.call import Gradients, Operands, Options
from relskew_core.backends import _compiled
from relskew_core.backends._torch.operator import Operator
from relskew_core.backends._torch.triton import backward, forward

OPERATOR = Operator("fused_attention", forward.attention, backward.attention_vjp, keeps=True)


def attention(operands: Operands, options: Options, **_: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if requested, the sums of weights."""
    return OPERATOR(operands, options)


def attention_vjp(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    *,
    out: Tensor | None,
    sums: Tensor | None,
    xp: Any = None,
    **more: Any,
) -> Gradients:
    """Return the gradients of every operand; missing results of the forward pass are computed again."""
    out, sums = _compiled.results(out, sums, partial(forward.attention, operands, options), xp=of_torch)
    return backward.attention_vjp(d_out, operands, options, out=out, sums=sums, **more)
