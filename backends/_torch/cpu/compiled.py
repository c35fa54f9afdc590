"""torch on CPU: calls by the kernels that were compiled at installation."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # documented, and not among what is exported

from relskew_core._array.precision import wide
from relskew_core._kernel.call import DIFFERENTIABLE, Operands, Options, shape_of_rows
from relskew_core.backends import _compiled, _ragged
from relskew_core.backends._compiled import Call
from relskew_core.backends._torch.cpu import threads

SHARED = 2**20
"""The multiplications for which waking one of torch's threads pays; usually it is awake."""


flattened = partial(_ragged.flattened, xp=xp)
"""Operands with one batch axis."""


def call_of(operands: Operands, options: Options) -> Call:
    return Call.of(flattened(operands), options)


def attend(operands: Operands, call: Call, *, lse: bool, sums: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the output (..., H, Lq, Dv) of a prepared call.

    If requested, also return the log-sum-exp (..., H, Lq), and the sums of weights (..., H, Lq, 2).
    """
    shape, x, q = shape_of_rows(operands), flattened(operands), operands.q
    dtype = wide(q.dtype, xp=xp) if lse or sums else q.dtype
    made = (
        q.new_empty((*shape, operands.v.shape[-1])),
        q.new_empty(shape, dtype=dtype) if lse else None,
        q.new_empty((*shape, 2), dtype=dtype) if sums else None,
    )
    if x is operands:
        _compiled.attend(x, call, *made, library=TORCH)
    else:
        rows = shape_of_rows(x)
        views = [None if each is None else each.view(*rows, *each.shape[len(shape) :]) for each in made]
        _compiled.attend(x, call, *views, library=TORCH)
    return made


def attention(operands: Operands, call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the output and the sums of weights of a prepared call."""
    out, _, sums = attend(operands, call, lse=False, sums=True)
    return out, sums


def pull_back(
    d_out: Tensor,
    operands: Operands,
    call: Call,
    out: Tensor,
    sums: Tensor,
    d_lse: Tensor | None = None,
    wanted: Container[str] = DIFFERENTIABLE,
) -> dict[str, Tensor]:
    """Return the gradients of a prepared call; of those that are not wanted, only the mask's is skipped."""
    if flattened(operands) is operands:
        found = _compiled.pull_back(d_out, operands, call, out, sums, d_lse, library=TORCH, wanted=wanted)
        return found if found["q"].dtype == operands.q.dtype else _compiled.of_call(found, operands, xp=xp)
    return attention_vjp(d_out, operands, call.own_options, out, sums, d_lse, wanted)


def attention_vjp(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    out: Tensor | None,
    sums: Tensor | None,
    d_lse: Tensor | None,
    wanted: Container[str] = DIFFERENTIABLE,
) -> dict[str, Tensor]:
    whole = flattened(operands)
    rows = shape_of_rows(whole)
    out, sums = (None if each is None else each.reshape(*rows, each.shape[-1]) for each in (out, sums))
    call = Call.of(whole, options)
    out, sums = _compiled.results(out, sums, partial(attention, whole, call), xp=xp)
    d_out, d_lse = d_out.reshape(*rows, -1), None if d_lse is None else d_lse.reshape(rows)
    found = _compiled.pull_back(d_out, whole, call, out, sums, d_lse, library=TORCH, wanted=wanted)
    return _compiled.of_call(found, operands, xp=xp)


def _capsules(arrays: Sequence[Tensor | None]) -> list[Any]:
    """Pass arrays as DLPack capsules, which carry their type and device."""
    try:
        return [x if x is None else to_dlpack(x.resolve_neg() if x.is_neg() else x) for x in arrays]
    except RuntimeError:  # raised by older releases of torch for a tensor without memory
        for x in arrays:
            _in_rows(x)
        raise


def _in_rows(x: Tensor | None) -> Tensor | None:
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
    _capsules,
    _in_rows,
    partial(torch.empty, device="cpu"),
    partial(torch.zeros, device="cpu"),
    torch.get_num_threads,
    team=threads.team,
    shared=SHARED,
)
