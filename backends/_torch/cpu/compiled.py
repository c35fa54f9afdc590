"""torch on CPU: calls of float32 by the kernels that were compiled at installation."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._array.softmax import share_of
from relskew_core._kernel.call import KINDS, Kind, Operands, Options
from relskew_core._kernel.plan import Layout, Plan
from relskew_core.backends import _compiled
from relskew_core.backends._torch.cpu import threads
from relskew_core.backends._torch.cpu.parts import Part, flattened, parts


def serves(x: Operands, options: Options) -> bool:
    """Whether the kernels take a call."""
    return x.q.dtype == torch.float32 and _compiled.serves(x, options)


def attend(x: Operands, options: Options, out: Tensor, lse: Tensor | None, layout: Layout | None = None) -> None:
    """Write the output (B, H, Lq, Dv) and, if it is asked for, the log-sum-exp (B, H, Lq) of a flattened call."""
    x = Operands(*(each if each is None else _in_rows(each) for each in x))
    _compiled.attend(x, options, layout, out, lse, library=TORCH)


def attention(operands: Operands, plan: Plan, *, return_lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the output (..., H, Lq, Dv) and, if asked for, the log-sum-exp (..., H, Lq) of a short call."""
    shape = operands.q.shape[:-1]
    out = torch.empty((*shape, operands.v.shape[-1]))
    lse = torch.empty(shape) if return_lse or plan.options.return_lse else None
    layout = plan.layout if shape[-1] == 1 else None
    if operands.q.ndim == 4 and operands.mask is None:
        attend(operands, plan.options, out, lse, layout)
    else:
        x = flattened(operands)
        rows = x.q.shape[:-1]
        attend(x, plan.options, out.view(*rows, -1), None if lse is None else lse.view(rows), layout)
    return out, lse


def attention_vjp(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    out: Tensor | None,
    lse: Tensor | None,
    d_lse: Tensor | None,
) -> dict[str, Tensor]:
    """Return the gradients of every operand but the mask, by name."""
    whole = flattened(operands)
    rows = whole.q.shape[:-1]
    if out is None or lse is None:
        own, own_lse = torch.zeros((*rows, whole.v.shape[-1])), torch.full(rows, -math.inf)
        for part in parts(whole, options):
            attend(part.operands, part.options, own[part.items], own_lse[part.items])
        if out is None:
            out = own if lse is None else own * share_of(own_lse, lse.reshape(rows), xp=xp)[..., None]
        lse = own_lse if lse is None else lse
    d_out, out, lse = d_out.reshape(*rows, -1), out.reshape(*rows, -1), lse.reshape(rows)
    d_lse = None if d_lse is None else d_lse.reshape(rows)
    if whole.mask is None:
        found = _pull_back(whole, options, d_out, out, lse, d_lse)
    else:
        found = {}
        for part in parts(whole, options):
            results = (part.cut("q", d_out), part.cut("q", out), part.cut("q", lse), part.cut("q", d_lse))
            for name, gradient in _pull_back(part.operands, part.options, *results).items():
                _put(found, name, gradient, part, getattr(whole, name))
    if operands.q.ndim == 4:
        return found
    return {name: gradient.view(getattr(operands, name).shape) for name, gradient in found.items()}


def serves_backward(x: Operands, options: Options, wanted: frozenset[str]) -> bool:
    """Whether the kernels take a call's backward pass, which gives no gradient of a mask."""
    learned = "mask" in wanted and x.mask is not None and x.mask.dtype != torch.bool
    return serves(x, options) and not learned


def _pull_back(
    x: Operands, options: Options, d_out: Tensor, out: Tensor, lse: Tensor, d_lse: Tensor | None
) -> dict[str, Tensor]:
    x = Operands(*(each if each is None else _in_rows(each) for each in x))
    return _compiled.pull_back(_in_rows(d_out), x, options, _in_rows(out), lse, d_lse, library=TORCH)


def _put(found: dict[str, Tensor], name: str, gradient: Tensor, part: Part, like: Tensor) -> None:
    """Put the gradient of a part where it belongs; those of tables are sums."""
    if KINDS[name] is not Kind.SEQUENCE:
        found[name] = found[name] + gradient if name in found else gradient
    elif gradient.shape == like.shape:
        found[name] = gradient
    else:
        part.cut(name, found.setdefault(name, torch.zeros(like.shape))).copy_(gradient)


def _in_rows(x: Tensor) -> Tensor:
    """Return an array whose rows are in one piece."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _lend(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride()


TORCH = _compiled.Library(xp, _lend, torch.empty, torch.zeros, torch.get_num_threads, threads.team)
