"""Attention over disjoint sets of keys, merged into attention over their union."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce

from relskew_core._array.precision import cast, wide
from relskew_core._array.softmax import shares_of
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.chunk import is_empty


def merged(outs: Sequence[Array], sums: Sequence[Array], *, xp: Namespace) -> tuple[Array, Array]:
    """Return the merged output (..., Lq, Dv) and sums (..., Lq, 2); zeros and ``-inf`` if no key is visible."""
    if is_empty(*sums[0].shape):  # not every library reduces empty axes
        return reduce(operator.add, outs), reduce(operator.add, sums)
    shares, total = shares_of(sums, xp=xp)
    dtype = outs[0].dtype
    summed = wide(dtype, xp=xp)
    parts = [
        cast(shares[..., index : index + 1], summed, xp=xp) * cast(out, summed, xp=xp) for index, out in enumerate(outs)
    ]
    return cast(reduce(operator.add, parts), dtype, xp=xp), total
