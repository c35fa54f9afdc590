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
from relskew_core.backends import _batch, _compiled
from relskew_core.backends._compiled import Call
from relskew_core.backends._torch.cpu import threads

SHARED = 2**20
"""The multiplications for which waking one of torch's threads pays; usually it is awake."""


flattened = partial(_batch.flattened, xp=xp)
"""Operands with one batch axis."""


def call_of(operands: Operands, options: Options) -> Call:
    """Return the description of a call for the kernels, which support it."""
    return Call.of(flattened(operands), options)


def attention(operands: Operands, call: Call, *, return_lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the output (..., H, Lq, Dv) and, if requested, the log-sum-exp (..., H, Lq) of a prepared call."""
    shape, x = shape_of_rows(operands), flattened(operands)
    out = operands.q.new_empty((*shape, operands.v.shape[-1]))
    lse = (
        operands.q.new_empty(shape, dtype=wide(operands.q.dtype, xp=xp))
        if return_lse or call.options.return_lse
        else None
    )
    if x is operands:
        _compiled.attend(x, call, out, lse, library=TORCH)
    else:
        rows = shape_of_rows(x)
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
    """Return the gradients of a prepared call; of those that are not wanted, only the mask's is skipped."""
    if flattened(operands) is operands:
        found = _compiled.pull_back(d_out, operands, call, out, lse, d_lse, library=TORCH, wanted=wanted)
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
    """Return the gradients; of those that are not wanted, only the mask's is skipped."""
    whole = flattened(operands)
    rows = shape_of_rows(whole)
    out, lse = None if out is None else out.reshape(*rows, -1), None if lse is None else lse.reshape(rows)
    call = Call.of(whole, options)
    out, lse = _compiled.results(out, lse, partial(attention, whole, call, return_lse=True), xp=xp)
    d_out, d_lse = d_out.reshape(*rows, -1), None if d_lse is None else d_lse.reshape(rows)
    found = _compiled.pull_back(d_out, whole, call, out, lse, d_lse, library=TORCH, wanted=wanted)
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
    """Return a tensor that is contiguous along its last axis and aligned."""
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
