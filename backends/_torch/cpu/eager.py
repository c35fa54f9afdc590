"""torch on CPU: calls that only autograd records, each as a single node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relskew_core._kernel.call import DIFFERENTIABLE, Gradients, GridOperands, Operands, Options, operands_of
from relskew_core.backends._compiled import Call
from relskew_core.backends._torch.cpu import compiled, grid
from relskew_core.backends._torch.cpu.operator import OPERATOR
from relskew_core.backends._torch.operator import flat, saved_by
from relskew_core.backends._torch.watched import are_mapped, is_ordinary, requires_gradients


def attention(operands: Operands, options: Options, **_: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output (..., H, Lq, Dv) and, if requested, the log-sum-exp (..., H, Lq)."""
    return attend(operands, compiled.call_of(operands, options))


def attend(x: Operands, call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the same for a prepared call."""
    if not requires_gradients(x):
        return compiled.attention(x, call)
    apply: Any = _Attention.apply
    results = apply(call, *x)
    return results if call.options.return_lse else (results, None)


def attention_vjp(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    d_lse: Tensor | None = None,
    **_: Any,
) -> Gradients:
    """Return the gradients of every operand."""
    return Gradients(**compiled.attention_vjp(d_out, operands, options, out, lse, d_lse))


class _Attention(torch.autograd.Function):
    """Attention by the compiled kernels, which saves the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, call: Call, *operands: Tensor | None) -> Any:
        """Attend."""
        out, lse = compiled.attention(operands_of(operands), call, return_lse=True)
        ctx.call = call
        ctx.save_for_backward(*operands, out, lse)
        return (out, lse) if call.options.return_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Return the gradients, by the operator if they will be differentiated again or others take part."""
        *operands, out, lse = saved_by(ctx)
        x, call = operands_of(operands), ctx.call
        wanted = [name for name, needs in zip(x._fields, ctx.needs_input_grad[1:], strict=True) if needs]
        seen = torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_ordinary()
        if (seen or are_mapped((d_out, d_lse))) and isinstance(x, GridOperands):
            gradients = grid.gradients(d_out, d_lse, x, call.own_options, wanted)
        elif seen or are_mapped((d_out, d_lse)):
            found = OPERATOR.vjp(d_out, d_lse, out, lse, " ".join(wanted), *x, *flat(call.own_options))
            gradients = dict(zip(DIFFERENTIABLE, found, strict=True))
        else:
            gradients = compiled.pull_back(d_out, x, call, out, lse, d_lse, wanted)
        return (None, *(gradients[name] if name in wanted else None for name in x._fields))
