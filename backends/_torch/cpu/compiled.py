"""torch on CPU: calls of float32 by the kernels that were compiled at installation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relskew_core._kernel.call import Operands, Options
from relskew_core._kernel.plan import Layout, Plan
from relskew_core.backends import _compiled
from relskew_core.backends._torch.cpu.parts import flattened


def serves(x: Operands, options: Options) -> bool:
    """Whether the kernels take a call."""
    return x.q.dtype == torch.float32 and _compiled.serves(x, options)


def attend(x: Operands, options: Options, out: Tensor, lse: Tensor | None, layout: Layout | None = None) -> None:
    """Write the output (B, H, Lq, Dv) and, if it is asked for, the log-sum-exp (B, H, Lq) of a flattened call."""
    x = Operands(*(each if each is None else _in_rows(each) for each in x))
    workers = torch.get_num_threads()
    _compiled.attend(x, options, layout, out, lse, lend=_lend, workers=workers)


def attention(operands: Operands, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """Return the output (..., H, Lq, Dv) and, if asked for, the log-sum-exp (..., H, Lq) of a short call."""
    q = operands.q
    plain = q.ndim == 4 and operands.mask is None
    x = operands if plain else flattened(operands)
    shape = q.shape[:-1]
    out = torch.empty((*shape, operands.v.shape[-1]))
    lse = torch.empty(shape) if plan.options.return_lse else None
    layout = plan.layout if shape[-1] == 1 else None
    if plain:
        attend(x, plan.options, out, lse, layout)
    else:
        flat = out.view(*x.q.shape[:-1], -1), None if lse is None else lse.view(x.q.shape[:-1])
        attend(x, plan.options, *flat, layout)
    return out, lse


def _in_rows(x: Tensor) -> Tensor:
    """Return an array whose rows are in one piece."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _lend(x: Tensor) -> tuple[int, ...]:
    return (x.data_ptr(), *(step if size > 1 else 0 for size, step in zip(x.shape, x.stride(), strict=True)))
