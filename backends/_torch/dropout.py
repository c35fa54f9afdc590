"""torch: attention with dropout on its weights, in the memory of attention without.

What is dropped follows from a seed, chunk by chunk: the backward pass draws it again instead of keeping it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core import backends
from relskew_core._kernel.backward import attention_vjp
from relskew_core._kernel.chunk import Chunk
from relskew_core._kernel.forward import attention
from relskew_core._kernel.problem import Operands, Options, problem
from relskew_core._positions.span import Span
from relskew_core.backends import _torch
from relskew_core.backends._torch.cpu import backward as cpu_backward
from relskew_core.backends._torch.cpu import forward as cpu_forward
from relskew_core.backends._torch.cpu.call import Dropout

_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? rel_k, Tensor? rel_v, Tensor? rel_bias, Tensor? rel_q, Tensor? mask"
_OPTIONS = (
    "SymInt left, SymInt right, str beyond, bool causal, SymInt? window_left, SymInt? window_right, SymInt? block_size,"
    " SymInt offset, float scale, float rel_scale, SymInt? chunk_size, bool return_lse, Tensor seed, float dropout"
)


def relative_attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_k: Tensor | None,
    span: Span | None,
    *,
    rel_v: Tensor | None = None,
    rel_bias: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
    mask: Tensor | None = None,
    offset: int = 0,
    dropout: float,
) -> Tensor:
    """Return ``relative_attention`` with a share ``dropout`` of its weights zeroed and the others scaled up.

    Moves torch's default generator on the CPU by one number, whatever the arrays' device. Under ``torch.func.grad`` and
    ``jvp``, which keep all weights anyway, factors are drawn as anything random there.
    """
    tables = {"rel_k": rel_k, "rel_v": rel_v, "rel_bias": rel_bias}
    arrays = {"q": q, "k": k, "v": v, **tables, "rel_q": None, "mask": mask}
    call = problem(
        **backends.autocast(arrays), span=span, causal=causal, window=window, block_size=block_size, offset=offset,
        scale=None, rel_scale=None, softcap=None, chunk_size=None,
    )  # fmt: skip
    if _torch.differentiates_by_function():
        out, _ = attention(call.operands, call.options, factors=partial(_drawn, 1 - dropout), xp=xp)
        out = out / (1 - dropout)
    else:
        seed = torch.randint(2**32, (), device="cpu")
        out = dropout_op(*call.operands.without_key_table(), *_torch.flat(call.options), seed, dropout)
    result: Tensor = call.result(out)
    return result


def _drawn(share: float, chunk: Chunk, weights: Tensor) -> Tensor:
    """Draw 1 for the weights that are kept and 0 for the others, in ways that ``torch.vmap`` takes part in."""
    return (torch.rand(weights.shape, dtype=weights.dtype, device=weights.device) < share).to(weights.dtype)


def _taken_apart(args: tuple[Any, ...]) -> tuple[Operands, Options, Dropout]:
    *options, seed, dropout = args[8:]
    operands = Operands(*args[:8])
    return operands, _torch.options_of(operands, *options), Dropout(int(seed), 1 - dropout)


def _forward(*args: Any) -> Tensor:
    operands, options, kept = _taken_apart(args)
    if operands.q.device.type == "cpu":
        out, _ = cpu_forward.attention(operands, options, dropout=kept)
    else:  # pragma: gpu only
        out, _ = attention(operands, options, factors=kept, xp=xp)
    return _torch.standing_alone(out).div_(kept.share)


def _vjp(d_out: Tensor, *args: Any) -> list[Tensor]:
    operands, options, kept = _taken_apart(args)
    d_out = d_out / kept.share
    if operands.q.device.type == "cpu":
        gradients = cpu_backward.attention_vjp(d_out, operands, options, dropout=kept)
    else:  # pragma: gpu only
        gradients = attention_vjp(d_out, operands, options, factors=kept, xp=xp)
    return [d_out.new_empty(0) if x is None else _torch.standing_alone(x) for x in gradients[:-1]]


dropout_op = torch.library.custom_op(
    "relskew::dropout_attention", _forward, mutates_args=(), schema=f"({_OPERANDS}, {_OPTIONS}) -> Tensor"
)
dropout_vjp_op = torch.library.custom_op(
    "relskew::dropout_attention_vjp",
    _vjp,
    mutates_args=(),
    schema=f"(Tensor d_out, {_OPERANDS}, {_OPTIONS}) -> Tensor[]",
)


@dropout_op.register_fake
def _(*args: Any) -> Tensor:
    q, _, v = args[:3]
    out: Tensor = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out


@dropout_vjp_op.register_fake
def _(d_out: Tensor, *args: Any) -> list[Tensor]:
    return [d_out.new_empty(0) if x is None or x.dtype == torch.bool else d_out.new_empty(x.shape) for x in args[:8]]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *options, seed, ctx.dropout = inputs[8:]
    ctx.save_for_backward(*inputs[:8], seed)
    ctx.options = options


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    *operands, seed = ctx.saved_tensors
    gradients = dropout_vjp_op(d_out, *operands, *ctx.options, seed, ctx.dropout)
    wanted = (gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False))
    return (*wanted, *(None for _ in ctx.options), None, None)


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    return torch.stack([dropout_op(*_torch.item(args, in_dims, index)) for index in range(info.batch_size)]), 0


def _vmap_vjp(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[list[Tensor], list[int]]:
    items = [dropout_vjp_op(*_torch.item(args, in_dims, index)) for index in range(info.batch_size)]
    return [torch.stack(parts) for parts in zip(*items, strict=True)], [0] * len(items[0])


torch.library.register_autograd("relskew::dropout_attention", _backward, setup_context=_setup_context)
torch.library.register_autograd("relskew::dropout_attention_vjp", _torch.second_backward)
torch.library.register_vmap("relskew::dropout_attention", _vmap)
torch.library.register_vmap("relskew::dropout_attention_vjp", _vmap_vjp)
