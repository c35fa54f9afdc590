"""dask: every pair of a block of queries and a block of keys is one call on the contents of the blocks.

So no task needs more than two blocks, however many there are, and pairs that do not see each other are no tasks. The
backward pass has a task for each block of the batch and the heads.
"""

from __future__ import annotations

from relskew_core._kernel.problem import Problem
from relskew_core.backends._dask import backward, blocks, whole
from relskew_core.backends._path import ARRAYS, EVERY, Path

SUPPORTED = frozenset((*ARRAYS, "key_table", "softcap", "q_segments", "k_segments"))
SUPPORTED |= {"beyond", "offset", "left", "right", "chunk_size", "return_lse", "part"}

SUPPORTED_BACKWARD = EVERY - {"offset_by_item"}


def serve(function: str, call: Problem) -> Path | str:
    if 0 in (*call.given.q.shape, *call.given.k.shape):
        return "dask's is for calls with something in them"
    if call.given.seed is not None:
        return "dask's does not take `dropout`"
    supports = SUPPORTED if function == "attention" else SUPPORTED_BACKWARD
    return Path(blocks.attention, backward.attention_vjp, supports=supports)


def instead(call: Problem) -> Path:
    """Return the portable kernels for arrays with a single block each: dask does not reshape all others."""
    return Path(whole.attention, whole.attention_vjp)
