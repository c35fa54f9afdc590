"""torch: calls in which others take part: transformations, modes, tracers, autograd, other kinds of tensors.

Operators show themselves to all of these but forward mode. Kernels that are called by themselves are seen by none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.autograd import forward_ad

from relskew_core._array.namespace import private
from relskew_core._kernel.backward import attention_vjp as portable
from relskew_core._kernel.call import Gradients, Operands, Options
from relskew_core.backends._torch.operator import Operator

TYPES = (Tensor, torch.nn.Parameter)
"""The types of arrays; subclasses may behave differently."""

Arrays = Iterable[Tensor | None]


jit: Any = torch.jit  # a documented name without a type
_interpreter = private("_C._functorch.peek_interpreter_stack", tuple)
_interpreters = private("_C._functorch.get_interpreter_stack", None)
_dispatch_modes = private("_C._len_torch_dispatch_stack", lambda: 1)
_function_modes = private("_C._len_torch_function_stack", lambda: 1)
_is_batched = private("_C._functorch.is_legacy_batchedtensor", lambda _: True)


def _level() -> int:
    return getattr(forward_ad, "_current_level", 0)


def is_transformed() -> bool:
    """Whether a transformation, a mode or a tracer has to see every operation."""
    return torch.compiler.is_compiling() or _interpreter() is not None or _dispatch_modes() > 0 or jit.is_tracing()


def is_ordinary() -> bool:
    """Whether nothing traces, records or changes the computation, outside compilation."""
    return not (
        torch.is_autocast_enabled("cpu")
        or _interpreter() is not None
        or _dispatch_modes()
        or _function_modes()
        or jit.is_tracing()
        or _level() >= 0
    )


def are_mapped(cotangents: Arrays) -> bool:
    """Whether autograd has many cotangents in one backward pass (``is_grads_batched``), which no interpreter shows."""
    return any(x is not None and _is_batched(x) for x in cotangents)


def is_watched(arrays: Arrays) -> bool:
    """Whether anything but the caller and autograd takes part in a call."""
    plain = all(x is None or type(x) in TYPES for x in arrays)
    return not plain or is_transformed() or has_tangents(arrays)


def differentiates_by_function() -> bool:
    """Whether a call is inside ``torch.func.grad`` or ``jvp``, which do not use the autograd formulas of operators."""
    if torch.compiler.is_compiling():
        return False
    return not _interpreters or any(level.key().name in ("Grad", "Jvp") for level in _interpreters() or ())


def has_tangents(arrays: Arrays) -> bool:
    """Whether forward mode differentiates one of the arrays, which operators do not support."""
    return _level() >= 0 and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in arrays)


def requires_gradients(arrays: Arrays) -> bool:
    """Whether autograd must record the results of a call."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays)


def by_itself(arrays: Arrays) -> bool:
    """Whether only the caller takes part in a call, without autograd."""
    return not is_watched(arrays) and not requires_gradients(arrays)


def pulled_back(kernel: Callable[..., Gradients], operator: Operator | None) -> Callable[..., Gradients]:
    """Return a function for gradients that calls the kernels directly if possible, and else the operator.

    The operator computes ``out`` and ``sums`` itself; a call that passes them runs in the portable code, as does a call
    that no operator supports.
    """

    def attention_vjp(
        d_out: Tensor,
        operands: Operands,
        options: Options,
        *,
        out: Tensor | None = None,
        sums: Tensor | None = None,
        d_lse: Tensor | None = None,
        **more: Any,
    ) -> Gradients:
        arrays = (d_out, out, sums, d_lse, *operands)
        if by_itself(arrays):
            return kernel(d_out, operands, options, out=out, sums=sums, d_lse=d_lse, **more)
        if operator is None or out is not None or sums is not None or has_tangents(arrays):
            return portable(d_out, operands, options, out=out, sums=sums, d_lse=d_lse, xp=xp)
        return operator.gradients(d_out, operands, options, d_lse=d_lse)

    return attention_vjp
