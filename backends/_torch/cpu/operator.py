"""torch on CPU as an operator, which saves its output and the sums of weights for the backward pass.

It is for calls in which others take part, who see its shapes and no values. Where these are not for the compiled
kernels, the portable ones do the same work.
"""

from __future__ import annotations

from dataclasses import replace

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._array.precision import wide, widened
from relskew_core._kernel.call import Gradients, Operands, Options
from relskew_core.backends import _compiled
from relskew_core.backends._torch import recomputed
from relskew_core.backends._torch.cpu import compiled
from relskew_core.backends._torch.operator import Operator


def _attend(operands: Operands, options: Options) -> tuple[Tensor, Tensor | None]:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        if _compiled.serves(operands, options):
            return compiled.attention(operands, compiled.call_of(operands, options))
    out, sums = recomputed.attend(_wide(operands), replace(options, return_lse=True))
    return out if options.part.of_more else out.to(operands.q.dtype), sums


def _pull_back(
    d_out: Tensor,
    operands: Operands,
    options: Options,
    *,
    out: Tensor | None,
    sums: Tensor | None,
    d_lse: Tensor | None,
    wanted: frozenset[str],
) -> Gradients | dict[str, Tensor]:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        if _compiled.serves(operands, options):
            return compiled.attention_vjp(d_out, operands, options, out, sums, d_lse, wanted)
    d_out = d_out.to(wide(d_out.dtype, xp=xp))
    return recomputed.pull_back(d_out, _wide(operands), options, d_lse=d_lse, wanted=wanted)


def _wide(operands: Operands) -> Operands:
    return Operands(*widened(operands, operands.q.dtype, xp=xp))


OPERATOR = Operator("attention", _attend, _pull_back, keeps=True, devices="cpu")
