"""Attention over disjoint sets of keys, merged into attention over their union."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce

from relskew_core._array.namespace import is_half
from relskew_core._array.softmax import softmax
from relskew_core._array.typing import Array, Namespace


def merged(outs: Sequence[Array], lses: Sequence[Array], *, xp: Namespace) -> tuple[Array, Array]:
    """Return output (..., Lq, Dv) and log-sum-exp (..., Lq) of all; zeros and ``-inf`` where no part sees a key."""
    shares, lse = softmax(xp.stack(lses, axis=-1), dead_rows=True, lse=True, xp=xp)
    assert lse is not None
    wide = xp.float32 if is_half(outs[0].dtype, xp=xp) else outs[0].dtype
    parts = [xp.astype(shares[..., index : index + 1], wide) * xp.astype(out, wide) for index, out in enumerate(outs)]
    return xp.astype(reduce(operator.add, parts), outs[0].dtype), lse
