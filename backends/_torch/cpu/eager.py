"""torch on CPU: calls that only autograd records, each as a single node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relskew_core._kernel.call import LEARNED, Gradients, Operands, Options
from relskew_core.backends._compiled import Call
from relskew_core.backends._torch.cpu import compiled
from relskew_core.backends._torch.cpu.operator import OPERATOR
from relskew_core.backends._torch.operator import flat, saved_by
from relskew_core.backends._torch.transformations import are_mapped, is_ordinary, requires_gradients


def attention(operands: Operands, options: Options, **_: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output (..., H, Lq, Dv) and, if requested, the sums of weights (..., H, Lq, 2)."""
    return attend(operands, compiled.call_of(operands, options))


def attend(x: Operands, call: Call, *, summed: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the same for a prepared call, or the log-sum-exp if the sums are to be ``summed``."""
    if not requires_gradients(x):
        asks = call.options.return_lse
        out, lse, sums = compiled.attend(x, call, lse=asks and summed, sums=asks and not summed)
        return out, lse if summed else sums
    apply: Any = _Attention.apply
    results = apply(call, summed, *x)
    return results if call.options.return_lse else (results, None)


def attention_vjp(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    *,
    out: Tensor | None = None,
    sums: Tensor | None = None,
    d_lse: Tensor | None = None,
    **_: Any,
) -> Gradients:
    return Gradients(**compiled.attention_vjp(d_out, operands, options, out, sums, d_lse))


class _Attention(torch.autograd.Function):
    """Attention by the compiled kernels, which saves the sums of weights."""

    @staticmethod
    def forward(ctx: Any, call: Call, summed: bool, *operands: Tensor | None) -> Any:
        asks = call.options.return_lse
        out, lse, sums = compiled.attend(Operands(*operands), call, lse=asks and summed, sums=True)
        ctx.call, ctx.summed = call, summed
        ctx.save_for_backward(*operands, out, sums)
        return (out, lse if summed else sums) if asks else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_sums: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Return the gradients, by the operator if they will be differentiated again or others take part."""
        *operands, out, sums = saved_by(ctx)
        d_lse = d_sums if d_sums is None or ctx.summed else d_sums[..., 1]
        x, call = Operands(*operands), ctx.call
        wanted = [name for name, needs in zip(x._fields, ctx.needs_input_grad[2:], strict=True) if needs]
        seen = torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_ordinary()
        if seen or are_mapped((d_out, d_lse)):
            found = OPERATOR.vjp(d_out, d_lse, out, sums, " ".join(wanted), *x, *flat(call.own_options))
            gradients = dict(zip(LEARNED, found, strict=True))
        else:
            gradients = compiled.pull_back(d_out, x, call, out, sums, d_lse, wanted)
        return (None, None, *(gradients[name] if name in wanted else None for name in x._fields))
