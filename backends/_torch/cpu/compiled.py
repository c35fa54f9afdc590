"""torch on CPU: calls by the kernels that were compiled at installation."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from functools import partial
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # documented, and not among what is exported

from relskew_core._array.precision import wide
from relskew_core._kernel.call import DIFFERENTIABLE, KINDS, Kind, Operands, Options
from relskew_core.backends import _compiled
from relskew_core.backends._compiled import Call
from relskew_core.backends._torch.cpu import threads
from relskew_core.backends._torch.cpu.parts import Share, flattened, parts, with_zeros

SHARED = 2**20
"""Multiplications for which it pays to wake a thread of torch's: as a rule it is awake."""

WORTH_CUTTING = 2**24
"""Multiplications above which it pays to look for keys that a mask hides from all queries of an item."""


def call_of(operands: Operands, options: Options) -> Call:
    """Return what the kernels are to know of a call that they take."""
    return Call.of(flattened(operands), options)


def attend(x: Operands, options: Options, out: Tensor, lse: Tensor | None) -> None:
    """Write the output (B, H, Lq, Dv) and, if it is asked for, the log-sum-exp (B, H, Lq) of a flattened call."""
    _compiled.attend(x, Call.of(x, options), out, lse, library=TORCH)


def attention(operands: Operands, call: Call, *, return_lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the output (..., H, Lq, Dv) and, if asked for, the log-sum-exp (..., H, Lq) of a call that is known."""
    shape, x = operands.q.shape[:-1], flattened(operands)
    if x.mask is not None and call.work > WORTH_CUTTING:
        whole, sums = _results(x, call.own_options)
        return whole.view(*shape, -1), sums.view(shape) if return_lse or call.options.return_lse else None
    out = operands.q.new_empty((*shape, operands.v.shape[-1]))
    lse = (
        operands.q.new_empty(shape, dtype=wide(operands.q.dtype, xp=xp))
        if return_lse or call.options.return_lse
        else None
    )
    if x is operands:
        _compiled.attend(x, call, out, lse, library=TORCH)
    else:
        rows = x.q.shape[:-1]
        _compiled.attend(x, call, out.view(*rows, -1), None if lse is None else lse.view(rows), library=TORCH)
    return out, lse


def pull_back(
    d_out: Tensor,
    operands: Operands,
    call: Call,
    out: Tensor,
    lse: Tensor,
    d_lse: Tensor | None = None,
    wanted: Container[str] = DIFFERENTIABLE,
) -> dict[str, Tensor]:
    """Return the gradients by name, of a call that is known; of those that are not wanted the mask's is left out."""
    if flattened(operands) is operands:
        found = _compiled.pull_back(d_out, operands, call, out, lse, d_lse, library=TORCH)
        return found if found["q"].dtype == operands.q.dtype else _compiled.of_call(found, operands, xp=xp)
    return attention_vjp(d_out, operands, call.own_options, out, lse, d_lse, wanted)


def attention_vjp(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    out: Tensor | None,
    lse: Tensor | None,
    d_lse: Tensor | None,
    wanted: Container[str] = DIFFERENTIABLE,
) -> dict[str, Tensor]:
    """Return the gradients by name; of those that are not wanted the mask's is left out."""
    whole = flattened(operands)
    rows = whole.q.shape[:-1]
    out, lse = None if out is None else out.reshape(*rows, -1), None if lse is None else lse.reshape(rows)
    out, lse = _compiled.results(out, lse, partial(_results, whole, options), xp=xp)
    d_out, d_lse = d_out.reshape(*rows, -1), None if d_lse is None else d_lse.reshape(rows)
    if whole.mask is None:
        found = _pull_back(whole, options, d_out, out, lse, d_lse, wanted)
    else:
        found = {}
        for part in parts(whole, options):
            own = part.cut("q", d_out), part.cut("q", out), part.cut("q", lse), part.cut("q", d_lse)
            for name, gradient in _pull_back(part.operands, part.options, *own, wanted).items():
                _put(found, name, gradient, part, getattr(whole, name))
        learned = _compiled.has_additive_mask(whole) and "mask" in wanted
        found = with_zeros(found, whole, [name for name in _compiled.GRADIENTS if name != "mask" or learned])
    return _compiled.of_call(found, operands, xp=xp)


def _results(x: Operands, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of a flattened call."""
    shape = x.q.shape[:-1]
    out = x.q.new_zeros((*shape, x.v.shape[-1]))
    lse = x.q.new_full(shape, -math.inf, dtype=wide(x.q.dtype, xp=xp))
    for part in parts(x, options):
        attend(part.operands, part.options, out[part.items], lse[part.items])
    return out, lse


def _pull_back(
    x: Operands,
    options: Options,
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    d_lse: Tensor | None,
    wanted: Container[str],
) -> dict[str, Tensor]:
    return _compiled.pull_back(d_out, x, Call.of(x, options), out, lse, d_lse, library=TORCH, wanted=wanted)


def _put(found: dict[str, Tensor], name: str, gradient: Tensor, part: Share, like: Tensor) -> None:
    """Put the gradient of a part where it belongs; those of tables are sums."""
    if KINDS[name] not in (Kind.SEQUENCE, Kind.MASK):
        found[name] = found[name] + gradient if name in found else gradient
    elif gradient.shape == like.shape:
        found[name] = gradient
    else:
        part.cut(name, found.setdefault(name, gradient.new_zeros(like.shape))).copy_(gradient)


def _lent(arrays: Sequence[Tensor | None]) -> list[Any]:
    """Lend arrays, as capsules of DLPack: the type and the device are said there too."""
    return [x if x is None else to_dlpack(x.resolve_neg() if x.is_neg() else x) for x in arrays]


def _in_rows(x: Tensor | None) -> Tensor | None:
    """Return a tensor whose rows are in one piece, where numbers are as a processor wants them."""
    if x is None:
        return None
    if x.numel() and not x.untyped_storage().nbytes() and not x._is_zerotensor():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no memory: its storage was resized to 0")
    in_one_piece = x.shape[-1] == 1 or x.stride(-1) == 1
    if in_one_piece and x.data_ptr() % x.element_size() == 0 and not x._is_zerotensor():
        return x
    return x.clone(memory_format=torch.contiguous_format)


TORCH = _compiled.Library(
    xp,
    _lent,
    _in_rows,
    partial(torch.empty, device="cpu"),
    partial(torch.zeros, device="cpu"),
    torch.get_num_threads,
    team=threads.team,
    shared=SHARED,
)
