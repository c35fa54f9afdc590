"""NumPy: native passes, forward and backward, head by head on threads."""

from __future__ import annotations

from relskew_core._kernel.problem import Problem
from relskew_core.backends import _compiled
from relskew_core.backends._numpy import compiled
from relskew_core.backends._numpy import short as short
from relskew_core.backends._numpy.backward import attention_vjp
from relskew_core.backends._numpy.forward import SHORT, attention
from relskew_core.backends._path import COMMON, Path

KNOWN = COMMON | {"softcap", "blocks_before", "q_segments", "k_segments", "dropout", "seed"}
"""The arrays and options that the forward pass knows; the backward pass knows nothing of dropout."""


def serve(function: str, call: Problem) -> Path | str:
    """Return the kernels that serve a call."""
    operands, forward = call.operands(), function == "attention"
    served = compiled.serves(operands, call.options) if forward else compiled.serves_backward(operands, call.options)
    knows = KNOWN if forward else KNOWN - {"dropout", "seed"}
    if served:
        knows |= _compiled.KNOWN
    faster = served or operands.q.shape[-2] * operands.k.shape[-2] > SHORT
    return Path(attention, attention_vjp, knows=knows, faster=faster)
