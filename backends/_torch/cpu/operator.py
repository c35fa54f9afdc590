"""torch on CPU as an operator, which keeps its output and the log-sum-exp for the backward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relskew_core._kernel.call import Gradients, Operands, Options
from relskew_core.backends._torch.cpu import backward, forward
from relskew_core.backends._torch.operator import Operator

OPERATOR = Operator("attention", forward.attention_with_lse, backward.own_attention_vjp, keeps=True, devices="cpu")


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if asked for, the log-sum-exp."""
    return OPERATOR(operands, options)


def attention_vjp(d_out: Tensor, operands: Operands, options: Options, *, xp: Any, **results: Any) -> Gradients:
    """Return the gradients of every operand."""
    return backward.attention_vjp(d_out, operands, options, **results)
