"""torch: compiled kernels for tensors on CPUs and fused ones on CUDA devices; operators with autograd formulas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from relskew_core._array.known import compiled_for_any, varies
from relskew_core._kernel.call import unsupported
from relskew_core._kernel.problem import Problem
from relskew_core._positions.ragged import RaggedVisibility
from relskew_core.backends import _compiled, _ragged
from relskew_core.backends._path import COMMON, EVERY, FUSED, PORTABLE, Path
from relskew_core.backends._torch import recomputed
from relskew_core.backends._torch.cpu import eager, operator
from relskew_core.backends._torch.cpu import prepared as prepared
from relskew_core.backends._torch.transformations import (
    by_itself,
    differentiates_by_function,
    has_tangents,
    is_watched,
    pulled_back,
    requires_gradients,
)


def serve(function: str, call: Problem) -> Path | str:
    device = call.given.q.device.type
    if differentiates_by_function() or has_tangents(call.given):
        return "torch.func.grad and forward mode go through the portable code alone"
    if call.options.sides and torch.compiler.is_exporting():
        return "graphs have no grids"
    if device == "cpu":
        return _on_cpus(call)
    if device == "cuda":
        from relskew_core.backends._torch.triton import choice

        reason = choice.refusal(call.operands(half=True), call.options)
        return reason or _fused(call)
    return f"torch has one for arrays on CPUs and CUDA devices, not on {device}"


IN_PAGES = COMMON | {"softcap"}
"""The arrays and options that the kernels for keys and values in pages support."""


def reads_pages(arrays: Sequence[Tensor | None]) -> bool:
    """Whether the fused kernels may read keys and values in their pages: outside of autograd and tracers."""
    return arrays[0] is not None and arrays[0].device.type == "cuda" and by_itself(arrays)


def serve_pages(call: Problem, pages: tuple[Tensor, ...], *, reaches: bool) -> Path | None:
    """Return the fused kernels for keys and values in pages, ``None`` if they do not support a call."""
    from relskew_core.backends._torch.triton import choice

    apart = any(x.stride(-1) != 1 for x in pages[:2]) or unsupported(call.given, call.options, IN_PAGES)
    if apart or choice.refusal(call.operands(half=True), call.options, paged=True):
        return None
    from relskew_core.backends._torch.triton import forward

    k, v, table, lengths = pages
    own = forward.Pages(k, v, table.contiguous(), lengths.contiguous(), reaches)
    return Path(lambda operands, options, **_: forward.attention(operands, options, own), PORTABLE.attention_vjp,
                half=True)  # fmt: skip


def _on_cpus(call: Problem) -> Path | str:
    """Return the kernels for CPUs; inside an operator if transformations or autograd take part in the call."""
    x, options, attend, half = call.given, call.options, eager.attention, call.is_final
    is_ragged = isinstance(options.visibility, RaggedVisibility)
    supports = _ragged.SUPPORTED if is_ragged else _compiled.SUPPORTED
    reason = _ragged.refusal(options) if is_ragged else None
    if is_watched(call.given):
        attend, reason = operator.OPERATOR, reason or _compiled.missing()
        # A learned softcap would be compiled again for every value.
        supports = supports - {"softcap"} if varies(options.softcap) else supports
    else:
        reason = reason or _compiled.refusal(x, options, supports)
    if reason is not None:
        return reason
    if is_ragged:
        return _by_run(attend, eager.attention_vjp, supports, half=half)
    return Path(attend, pulled_back(eager.attention_vjp, operator.OPERATOR), supports=supports, half=half)


def _by_run(attend: Any, pull_back: Any, supports: frozenset[str], *, half: bool) -> Path:
    """Return kernels for a batch with offsets by item: a call for each run of equal ones."""
    attend_runs = partial(_ragged.attention, attend=attend, split=torch.split)
    pull_back_runs = partial(_ragged.attention_vjp, pull_back=pull_back, split=torch.split)
    return Path(attend_runs, pulled_back(pull_back_runs, None), supports=supports, half=half)


KEPT = 2**20
"""The most logits that autograd may keep of the portable kernels, because recomputing them would take longer."""


def instead(call: Problem) -> Path:
    """Return the portable kernels, as one operator if autograd would keep too much of them, and in exports.

    There an operator is what the ONNX translation converts, at any length, and what DTensors have rules for.
    """
    operands, sides = call.given, call.options.sides
    # No operator supports offsets per item, or takes part in these transformations.
    ragged_batch = isinstance(call.options.visibility, RaggedVisibility)
    if ragged_batch or differentiates_by_function() or has_tangents(operands):
        return PORTABLE
    if sides and not compiled_for_any(*(number for side in sides for number in side), *operands.q.shape[:-2]):
        return PORTABLE  # otherwise the number of parts, which depends on the height, would be that of the program
    # The rules of a DTensor are for operators; and under other transformations, attention on CPUs is one step, with or
    # without kernels.
    one_step = operands.q.device.type == "cpu" and _compiled.missing() is not None and is_watched(operands)
    if one_step or torch.compiler.is_exporting() or hasattr(operands.q, "placements"):
        return Path(recomputed.OPERATOR, pulled_back(PORTABLE.attention_vjp, recomputed.OPERATOR))
    logits = operands.q[..., 0].numel() * operands.k.shape[-2]
    if logits <= KEPT or not requires_gradients(operands):
        return PORTABLE
    return Path(recomputed.OPERATOR, PORTABLE.attention_vjp)


def _fused(call: Problem) -> Path | str:
    """Return the fused kernels; no operator supports offsets by item, which are one call for each run."""
    from relskew_core.backends._torch.triton import operator as fused

    if isinstance(call.options.visibility, RaggedVisibility):
        reason = _ragged.refusal(call.options)
        return reason or _by_run(fused.attention, fused.attention_vjp, EVERY, half=True)
    pull_back = pulled_back(fused.attention_vjp, fused.OPERATOR)
    return Path(fused.attention, pull_back, supports=FUSED, half=True)
