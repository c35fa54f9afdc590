"""torch: the native paths as operators that autograd, ``torch.compile``, ``torch.export`` and ``torch.vmap`` know.

``relskew::attention`` keeps nothing but its inputs for the backward pass, which computes the weights anew.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from relskew_core._kernel.problem import Gradients, Operands, Options, Problem
from relskew_core._positions.span import Span
from relskew_core._positions.visibility import Visibility
from relskew_core.backends._torch.cpu import backward as cpu_backward
from relskew_core.backends._torch.cpu import forward as cpu_forward
from relskew_core.backends._torch.triton import choice


def refusal(function: str, call: Problem) -> str | None:
    """Say why there is no native path for a call, ``None`` if there is one."""
    device = call.given.q.device.type
    if differentiates_by_function():
        return "torch.func.grad and jvp go through the portable code alone"
    if device == "cuda":
        return choice.refusal(call.given, call.options)
    if device != "cpu":
        return f"torch has one for arrays on CPUs and CUDA devices, not on {device}"
    if call.options.softcap is not None:
        return "torch's does not take `softcap`"
    return None


def takes_half(call: Problem) -> bool:
    """Whether the native path takes arrays of half precision as they are."""
    return call.given.q.device.type == "cuda"


def differentiates_by_function() -> bool:
    """Whether a call stands inside ``torch.func.grad`` or ``jvp``, which no operator's autograd takes part in."""
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    differentiating = (functorch.TransformType.Grad, functorch.TransformType.Jvp)
    return any(level.key() in differentiating for level in functorch.get_interpreter_stack() or ())


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if asked for, the log-sum-exp."""
    if operands.q.device.type == "cuda":  # pragma: gpu only
        return fused().attention(operands, options)
    out, lse = attention_op(*operands.without_key_table(), *flat(options))
    return out, lse if options.return_lse else None


def attention_vjp(d_out: Tensor, operands: Operands, options: Options, *, out: Tensor | None, xp: Any) -> Gradients:
    """Return the gradients of every operand."""
    if operands.q.device.type == "cuda":  # pragma: gpu only
        return fused().attention_vjp(d_out, operands, options)
    return cpu_backward.attention_vjp(d_out, operands, options)


def fused() -> Any:  # pragma: gpu only
    """Import the fused kernels, which need Triton."""
    from relskew_core.backends._torch.triton import operator as triton_operator

    return triton_operator


def cast_for_autocast(arrays: dict[str, Any]) -> dict[str, Any]:
    """Cast what floats to the dtype of the autocast region that a call stands in, as torch's own attention does."""
    device = next(x for x in arrays.values() if isinstance(x, Tensor)).device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # torch refuses to be asked about meta
        return arrays
    dtype = torch.get_autocast_dtype(device)
    lower = (torch.float32, torch.float16, torch.bfloat16)
    return {name: x.to(dtype) if isinstance(x, Tensor) and x.dtype in lower else x for name, x in arrays.items()}


@torch.library.custom_op("relskew::attention", mutates_args=(), device_types="cpu")
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_k: Tensor | None,
    rel_v: Tensor | None,
    rel_bias: Tensor | None,
    rel_q: Tensor | None,
    mask: Tensor | None,
    left: int,
    right: int,
    beyond: str,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    block_size: int | None,
    offset: int,
    scale: float,
    rel_scale: float,
    chunk_size: int | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend; the log-sum-exp is empty unless asked for."""
    operands = Operands(q, k, v, rel_k, rel_v, rel_bias, rel_q, mask)
    options = options_of(
        operands, left, right, beyond, causal, window_left, window_right, block_size, offset, scale, rel_scale,
        chunk_size, return_lse,
    )  # fmt: skip
    out, lse = cpu_forward.attention(operands, options)
    return standing_alone(out), q.new_empty(0) if lse is None else standing_alone(lse)


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1] if rest[-1] else (0,))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


@torch.library.custom_op("relskew::attention_vjp", mutates_args=(), device_types="cpu")
def attention_vjp_op(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_k: Tensor | None,
    rel_v: Tensor | None,
    rel_bias: Tensor | None,
    rel_q: Tensor | None,
    mask: Tensor | None,
    left: int,
    right: int,
    beyond: str,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    block_size: int | None,
    offset: int,
    scale: float,
    rel_scale: float,
    chunk_size: int | None,
    mask_gradient: bool,
) -> list[Tensor]:
    """Return the gradients of the eight arrays, empty ones for those that are absent or not wanted."""
    operands = Operands(q, k, v, rel_k, rel_v, rel_bias, rel_q, mask)
    options = options_of(
        operands, left, right, beyond, causal, window_left, window_right, block_size, offset, scale, rel_scale,
        chunk_size, False,
    )  # fmt: skip
    gradients = cpu_backward.attention_vjp(d_out, operands, options, d_lse=d_lse, mask_gradient=mask_gradient)
    return [q.new_empty(0) if x is None else standing_alone(x) for x in gradients[:-1]]  # all but `key_table`'s


def standing_alone(x: Tensor) -> Tensor:
    """Return ``x`` contiguous and in memory of its own, as operators must and as the fake kernel says."""
    alone = x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if alone else x.clone(memory_format=torch.contiguous_format)


@attention_vjp_op.register_fake
def _(d_out: Tensor, d_lse: Tensor | None, *rest: Any) -> list[Tensor]:
    operands, mask_gradient = Operands(*rest[:8]), rest[-1]
    wanted = (operands if mask_gradient else operands._replace(mask=None)).without_key_table()
    q = operands.q
    return [q.new_empty(0) if x is None or x.dtype == torch.bool else q.new_empty(x.shape) for x in wanted]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    *options, return_lse = ctx.options
    wanted = ctx.needs_input_grad[:8]
    gradients = attention_vjp_op(d_out, d_lse if return_lse else None, *ctx.saved_tensors, *options, wanted[7])
    return (
        *(gradient if needed else None for gradient, needed in zip(gradients, wanted, strict=True)),
        *(None for _ in ctx.options),
    )


def second_backward(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError("the native path of relative attention is differentiable once; impl='portable' is to any order")


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    operands, dims = Operands(*args[:8]), Operands(*in_dims[:8])
    if any(dim is not None for dim in (dims.rel_k, dims.rel_v, dims.rel_bias)):  # one table for each item: one by one
        items = [item(args, in_dims, index) for index in range(info.batch_size)]
        outs, lses = zip(*(attention_op(*item) for item in items), strict=True)
        return (torch.stack(outs), torch.stack(lses)), (0, 0)

    def batched(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    mask = operands.mask
    if mask is not None and dims.mask is not None:
        mask = mask.movedim(dims.mask, 0)
        q_axes = operands.q.ndim - (dims.q is not None)
        mask = mask.reshape(mask.shape[0], *(1,) * (q_axes + 1 - mask.ndim), *mask.shape[1:])
    moved = {name: batched(getattr(operands, name), getattr(dims, name)) for name in ("q", "k", "v", "rel_q")}
    out, lse = attention_op(*operands._replace(**moved, mask=mask).without_key_table(), *args[8:])
    if not args[-1]:
        lse = lse.new_empty((info.batch_size, 0))
    return (out, lse), (0, 0)


def _vmap_vjp(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[list[Tensor], list[int]]:
    items = [attention_vjp_op(*item(args, in_dims, index)) for index in range(info.batch_size)]
    return [torch.stack(parts) for parts in zip(*items, strict=True)], [0] * len(items[0])


torch.library.register_autograd("relskew::attention", _backward, setup_context=_setup_context)
torch.library.register_autograd("relskew::attention_vjp", second_backward)
torch.library.register_vmap("relskew::attention", _vmap)
torch.library.register_vmap("relskew::attention_vjp", _vmap_vjp)


def item(args: tuple[Any, ...], in_dims: tuple[int | None, ...], index: int) -> list[Any]:
    return [arg if dim is None else arg.select(dim, index) for arg, dim in zip(args, in_dims, strict=True)]


def flat(options: Options) -> tuple[Any, ...]:
    """Return the options as the numbers that an operator's schema takes."""
    visibility = options.visibility
    return (
        *astuple(options.span),
        visibility.causal,
        visibility.left if visibility.window else None,
        None if visibility.window is None else visibility.window[1],
        visibility.block_size,
        visibility.offset,
        options.scale,
        options.rel_scale,
        options.chunk_size,
        options.return_lse,
    )


def options_of(
    operands: Operands,
    left: int,
    right: int,
    beyond: Any,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    block_size: int | None,
    offset: int,
    scale: float,
    rel_scale: float,
    chunk_size: int | None,
    return_lse: bool,
    softcap: float | None = None,
) -> Options:
    """Return what :func:`flat` took apart; it leaves the softcap, which the fused kernels alone take."""
    window = None if window_left is None and window_right is None else (window_left, window_right)
    visibility = Visibility(
        operands.q.shape[-2], operands.k.shape[-2], offset, causal, window=window, block_size=block_size
    )
    return Options(Span(left, right, beyond), visibility, scale, rel_scale, softcap, chunk_size, return_lse)
