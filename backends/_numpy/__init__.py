"""NumPy: a native forward pass, head by head on threads."""

from __future__ import annotations

from relskew_core._kernel.problem import Problem
from relskew_core.backends._numpy import short as short
from relskew_core.backends._numpy.headwise import SHORT, attention
from relskew_core.backends._path import COMMON, PORTABLE, Path

KNOWN = COMMON | {"softcap", "blocks_before", "q_segments", "k_segments", "dropout", "seed"}
"""The arrays and options that these kernels know."""


def serve(function: str, call: Problem) -> Path | str:
    """Return the kernels that serve a call, or say why there are none."""
    if function != "attention":
        return f"NumPy's serves the forward pass, not {function}"
    q, k = call.given.q, call.given.k
    long = q.shape[-2] * k.shape[-2] > SHORT
    return Path(attention, PORTABLE.attention_vjp, knows=KNOWN, faster=long)
