"""torch: attention with dropout on its weights, in the memory of attention without.

What is dropped follows from a seed, chunk by chunk: the backward pass draws it again instead of keeping it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._kernel import backward as portable_backward
from relskew_core._kernel import forward as portable_forward
from relskew_core._kernel.call import Arguments, Gradients, Operands, Options, takes, unknown
from relskew_core._kernel.chunk import Chunk
from relskew_core._kernel.problem import problem
from relskew_core.backends._path import COMMON
from relskew_core.backends._torch import differentiates_by_function
from relskew_core.backends._torch.cpu import backward, forward
from relskew_core.backends._torch.cpu.call import Dropout
from relskew_core.backends._torch.operator import Operator


@dataclass(eq=False)
class _Dropped(Arguments):
    _: KW_ONLY
    dropout: float = 0.0


@takes(_Dropped)
def relative_attention_with_dropout(given: _Dropped) -> Tensor:
    """Return ``relative_attention`` with a share ``dropout`` of its weights zeroed and the others scaled up.

    Moves torch's default generator on the CPU by one number, whatever the arrays' device. Under ``torch.func.grad`` and
    ``jvp``, which keep all weights anyway, factors are drawn as anything random there.
    """
    call = problem(given.autocast())
    if differentiates_by_function():
        factors = partial(_drawn, 1 - given.dropout)
        out, _ = portable_forward.attention(call.operands(), call.options, factors=factors, xp=xp)
        out = out / (1 - given.dropout)
    else:
        seed = torch.randint(2**32, (), device="cpu")
        out, _ = OPERATOR(call.operands(), call.options, seed=seed, dropout=given.dropout)
    result: Tensor = call.result(out)
    return result


def _drawn(share: float, chunk: Chunk, weights: Tensor) -> Tensor:
    """Draw 1 for the weights that are kept and 0 for the others, in ways that ``torch.vmap`` takes part in."""
    return (torch.rand(weights.shape, dtype=weights.dtype, device=weights.device) < share).to(weights.dtype)


def _attend(operands: Operands, options: Options, *, seed: Tensor, dropout: float) -> tuple[Tensor, Tensor | None]:
    kept = Dropout(int(seed), 1 - dropout)
    if _in_stacks(operands, options):
        out, lse = forward.attention(operands, options, dropout=kept)
    else:
        out, lse = portable_forward.attention(operands, options, factors=kept, xp=xp)
    return out / kept.share, lse


def _pull_back(
    d_out: Tensor, operands: Operands, options: Options, *, seed: Tensor, dropout: float, wanted: Any, **results: Any
) -> Gradients:
    kept = Dropout(int(seed), 1 - dropout)
    d_out = d_out / kept.share
    if _in_stacks(operands, options):
        return backward.attention_vjp(d_out, operands, options, dropout=kept, wanted=wanted, **results)
    return portable_backward.attention_vjp(d_out, operands, options, factors=kept, xp=xp, **results)


def _in_stacks(operands: Operands, options: Options) -> bool:
    """Whether the kernels of the CPU serve a call."""
    return bool(operands.q.device.type == "cpu" and not unknown(operands, options, COMMON))


OPERATOR = Operator(
    "dropout_attention", _attend, _pull_back, extra={"seed": "Tensor", "dropout": "float"}, portable=None
)
