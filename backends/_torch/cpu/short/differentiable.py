"""torch on CPU: short calls that autograd knows, one node each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from relskew_core._kernel.call import DIFFERENTIABLE, Operands, Options
from relskew_core._kernel.plan import Plan
from relskew_core.backends._compiled import Call
from relskew_core.backends._torch.cpu import compiled as kernels
from relskew_core.backends._torch.cpu.operator import OPERATOR
from relskew_core.backends._torch.cpu.short.backward import pull_back
from relskew_core.backends._torch.cpu.short.block import blocks, joined
from relskew_core.backends._torch.cpu.short.forward import attend
from relskew_core.backends._torch.operator import flat

KEPT = 2**20
"""Weights up to which they are kept for the backward pass; logits that an item may have: what memory is spent on."""

COUNT = len(Operands._fields)


def ordinary() -> bool:
    """Whether nobody traces, watches or changes what is computed here."""
    return not (
        torch.is_autocast_enabled("cpu")
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def attention(x: Operands, plan: Plan) -> Tensor:
    """Return the output, with gradients."""
    apply: Any = _Attention.apply
    out: Tensor = apply(plan, *x)
    return out


def by_kernels(x: Operands, call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if it is asked for, the log-sum-exp, with gradients, by compiled kernels."""
    apply: Any = _Compiled.apply
    results = apply(call, *x)
    return results if call.options.return_lse else (results, None)


class _Attention(torch.autograd.Function):
    """The output alone, with gradients."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *operands: Tensor | None) -> Tensor:
        """Attend, and keep the weights if they are few."""
        x = Operands(*operands)
        parts = [attend(block, plan) for block in blocks(x, plan, training=True)]
        kept = [weights for _, _, weights in parts]
        ctx.plan = plan
        ctx.save_for_backward(*operands, *(kept if sum(weights.numel() for weights in kept) <= KEPT else ()))
        return joined([out for out, _, _ in parts]).view(*x.q.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; where these are to be differentiated again, the operator's."""
        saved = ctx.saved_tensors  # which checkpoints let nobody ask for twice
        operands, kept = Operands(*saved[:COUNT]), saved[COUNT:]
        options = ctx.plan.options_for(operands.k.shape[-2])
        return _wanted(ctx, d_out, operands, options, lambda: pull_back(d_out, operands, ctx.plan, kept))


class _Compiled(torch.autograd.Function):
    """The same by compiled kernels, which keep the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, call: Call, *operands: Tensor | None) -> Any:
        """Attend."""
        out, lse = kernels.attention(Operands(*operands), call, return_lse=True)
        ctx.call = call
        ctx.save_for_backward(*operands, out, lse)
        return (out, lse) if call.options.return_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Return the gradients; where these are to be differentiated again, the operator's."""
        *operands, out, lse = ctx.saved_tensors  # which checkpoints let nobody ask for twice
        x, call = Operands(*operands), ctx.call
        wanted = () if not ctx.needs_input_grad[1 + Operands._fields.index("mask")] else ("mask",)
        compute = partial(kernels.pull_back, d_out, x, call, out, lse, d_lse, wanted)
        return _wanted(ctx, d_out, x, call.own_options, compute, out, lse, d_lse)


def _wanted(
    ctx: Any,
    d_out: Tensor,
    x: Operands,
    options: Options,
    compute: Callable[[], dict[str, Any]],
    *results: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients that are asked for; where these are to be differentiated again, the operator's."""
    wanted = [name for name, needs in zip(Operands._fields, ctx.needs_input_grad[1:], strict=True) if needs]
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not ordinary():
        gradients = _by_operator(d_out, x, options, wanted, *results)
    else:
        gradients = compute()
    return (None, *(gradients[name] if name in wanted else None for name in Operands._fields))


def _by_operator(
    d_out: Tensor,
    x: Operands,
    options: Options,
    wanted: list[str],
    out: Tensor | None = None,
    lse: Tensor | None = None,
    d_lse: Tensor | None = None,
) -> dict[str, Any]:
    found = OPERATOR.vjp(d_out, d_lse, out, lse, " ".join(wanted), *x, *flat(options))
    return dict(zip(DIFFERENTIABLE, found, strict=True))
