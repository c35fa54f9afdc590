"""torch: the portable kernels as one operator, which saves only its inputs and recomputes the rest.

For long calls that no other path serves: left to autograd, every chunk's weights would stay until the backward pass.
"""

from __future__ import annotations

from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._array.namespace import private
from relskew_core._array.softmax import log_sum_exp
from relskew_core._kernel import backward, forward, grids
from relskew_core._kernel.call import LEARNED, Gradients, Operands, Options, named
from relskew_core.backends._torch.operator import Operator

_exclude = private("_C._SetExcludeDispatchKeyGuard", None)
_autograd = private("_C.DispatchKey.AutogradFunctionality", None)  # excluded in the kernels of operators


def attend(operands: Operands, options: Options) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if requested, the sums of weights, without autograd."""
    kernel = partial(grids.attention, kernel=_attend_part) if options.sides else forward.attention
    with torch.no_grad(), torch.autocast(operands.q.device.type, enabled=False):
        return kernel(operands, options, xp=xp)


def pull_back(
    d_out: Tensor, operands: Operands, options: Options, *, wanted: Container[str], d_lse: Any, **results: Any
) -> Gradients | dict[str, Tensor]:
    with torch.autocast(operands.q.device.type, enabled=False):
        if options.sides:
            given = d_out, operands, options, wanted, d_lse
            if _exclude is None or _autograd is None:  # threads start with nothing excluded
                with ThreadPoolExecutor(1) as thread:
                    return thread.submit(_on_grids, *given).result()
            with _exclude(_autograd, False):
                return _on_grids(*given)
        with torch.no_grad():
            return backward.attention_vjp(d_out, operands, options, d_lse=d_lse, xp=xp, **results)


def _on_grids(
    d_out: Tensor, operands: Operands, options: Options, wanted: Container[str], d_lse: Tensor | None
) -> dict[str, Tensor]:
    """Return the sums of the gradients of a call's parts, one part after the other."""
    names = [name for name in LEARNED if name in wanted]
    leaves = {name: getattr(operands, name).detach().requires_grad_() for name in names}
    given = Operands(**{**named(operands), **leaves})
    with torch.enable_grad():
        for rows, own, of_part in grids.parts(given, replace(options, return_lse=True), xp=xp):
            out, sums = _attend_part(own, of_part, xp=xp)
            pairs = [(out, d_out[..., rows, :])]
            if d_lse is not None:
                pairs.append((log_sum_exp(sums), d_lse[..., rows]))
            pairs = [pair for pair in pairs if pair[0].requires_grad]
            if pairs:
                torch.autograd.backward([x for x, _ in pairs], [d_x.to(x.dtype) for x, d_x in pairs])
    return {name: x.new_zeros(x.shape) if x.grad is None else x.grad for name, x in leaves.items()}


def _attend_part(x: Operands, options: Options, *, xp: Any) -> Any:
    if x.q.is_cuda:  # pragma: gpu only
        from relskew_core.backends._torch.triton import choice, operator

        if choice.refusal(x, options) is None:
            return operator.attention(x, options, xp=xp)
    return forward.attention(x, options, xp=xp)


OPERATOR = Operator("recomputed_attention", attend, pull_back)
