"""Triton: the fused kernels as operators that autograd, ``torch.compile``, ``torch.export`` and ``torch.vmap`` know.

``relskew::fused_attention`` keeps its output and the log-sum-exp for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relskew_core._kernel.problem import Gradients, Operands, Options
from relskew_core.backends import _torch
from relskew_core.backends._torch.triton import backward as triton_backward
from relskew_core.backends._torch.triton import forward as triton_forward

_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? rel_k, Tensor? rel_v, Tensor? rel_bias, Tensor? rel_q, Tensor? mask"
_OPTIONS = (
    "SymInt left, SymInt right, str beyond, bool causal, SymInt? window_left, SymInt? window_right, SymInt? block_size,"
    " SymInt offset, float scale, float rel_scale, SymInt? chunk_size, bool return_lse, float? softcap"
)


def attention(operands: Operands, options: Options) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if asked for, the log-sum-exp."""
    out, lse = fused_op(*operands[:8], *_torch.flat(options), options.softcap)
    return out, lse if options.return_lse else None


def attention_vjp(d_out: Tensor, operands: Operands, options: Options) -> Gradients:
    """Return the gradients of every operand."""
    out, lse = triton_forward.attention(operands, options)
    return triton_backward.attention_vjp(d_out, operands, options, out=out, lse=lse)


def _taken_apart(args: tuple[Any, ...]) -> tuple[Operands, Options]:
    operands = Operands(*args[:8])
    return operands, _torch.options_of(operands, *args[8:])


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    return triton_forward.attention(*_taken_apart(args))


def _vjp(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *args: Any) -> list[Tensor]:
    operands, options = _taken_apart(args)
    terms, values, mask = wanted
    gradients = triton_backward.attention_vjp(
        d_out, operands, options, out=out, lse=lse, d_lse=d_lse, wanted=(terms, values, mask)
    )
    return [
        d_out.new_empty(0) if x is None or like is None else _torch.standing_alone(x.to(like.dtype))
        for x, like in zip(gradients[:8], operands[:8], strict=True)
    ]


fused_op = torch.library.custom_op(
    "relskew::fused_attention", _forward, mutates_args=(), schema=f"({_OPERANDS}, {_OPTIONS}) -> (Tensor, Tensor)"
)
fused_vjp_op = torch.library.custom_op(
    "relskew::fused_attention_vjp",
    _vjp,
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, bool[] wanted, {_OPERANDS}, {_OPTIONS}) -> Tensor[]",
)


@fused_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32)


@fused_vjp_op.register_fake
def _(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *rest: Any) -> list[Tensor]:
    operands = Operands(*rest[:8])
    terms, values, mask = wanted
    served = Operands(True, True, True, terms, values, terms, True, mask)
    return [
        d_out.new_empty(0) if x is None or x.dtype == torch.bool or not here else x.new_empty(x.shape)
        for x, here in zip(operands[:8], served[:8], strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.options = inputs[8:]


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    *operands, out, lse = ctx.saved_tensors
    *_, return_lse, _ = ctx.options
    needed = Operands(*ctx.needs_input_grad[:8])
    wanted = [needed.rel_k or needed.rel_bias, needed.rel_v, needed.mask]
    gradients = fused_vjp_op(d_out, d_lse if return_lse else None, out, lse, wanted, *operands, *ctx.options)
    return (
        *(gradient if wants else None for gradient, wants in zip(gradients, needed[:8], strict=True)),
        *(None for _ in ctx.options),
    )


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    items = [fused_op(*_torch.item(args, in_dims, index)) for index in range(info.batch_size)]
    outs, lses = zip(*items, strict=True)
    return (torch.stack(outs), torch.stack(lses)), (0, 0)


def _vmap_vjp(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[list[Tensor], list[int]]:
    dims = (*in_dims[:4], None, *in_dims[5:])  # of the flags, a list of their own
    items = [fused_vjp_op(*_torch.item(args, dims, index)) for index in range(info.batch_size)]
    return [torch.stack(parts) for parts in zip(*items, strict=True)], [0] * len(items[0])


torch.library.register_autograd("relskew::fused_attention", _backward, setup_context=_setup_context)
torch.library.register_autograd("relskew::fused_attention_vjp", _torch.second_backward)
torch.library.register_vmap("relskew::fused_attention", _vmap)
torch.library.register_vmap("relskew::fused_attention_vjp", _vmap_vjp)
