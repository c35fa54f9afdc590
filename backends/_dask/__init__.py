"""dask: every pair of a block of queries and a block of keys is one call on what the blocks hold.

So no task needs more than two blocks, however many there are, and pairs that do not see each other are no tasks.
"""

from __future__ import annotations

from relskew_core._kernel.problem import Problem
from relskew_core.backends._dask import blocks, whole
from relskew_core.backends._path import ARRAYS, Path

KNOWN = frozenset((*ARRAYS, "key_table", "softcap", "q_segments", "k_segments"))
KNOWN |= {"beyond", "offset", "left", "right", "chunk_size", "return_lse", "part"}


def serve(function: str, call: Problem) -> Path | str:
    """Return the kernels that serve a call, or say why there are none."""
    if function != "attention":
        return "dask has one for the forward pass"
    if 0 in (*call.given.q.shape, *call.given.k.shape):
        return "dask's is for calls with something in them"
    if call.given.seed is not None:
        return "dask's does not take `dropout`"
    return Path(blocks.attention, whole.attention_vjp, knows=KNOWN)


def instead(call: Problem) -> Path:
    """Return the portable kernels, for arrays of one block each: dask does not reshape all others."""
    return Path(whole.attention, whole.attention_vjp)
