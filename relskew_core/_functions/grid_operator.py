"""Attention over grids in several chunks as one operator of torch, for programs that serve any sides.

Which rows of keys some rows of queries see depends on the height, and so does how many chunks there are: a program of
torch's operations would be another one for each height.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from relskew_core._array.typing import Array, Namespace
from relskew_core._functions.grid_layout import Grids, Surroundings
from relskew_core._functions.grid_parts import GridParts
from relskew_core._positions.span import Span
from relskew_core.backends._torch.in_parts import OperatorInParts

BEYOND: Any = ("error", "clip", "zero")

PER_AXIS = 8
"""The numbers of an axis: five of the grids, how far back and ahead a window reaches, the size of a neighborhood."""

Layout = Sequence[int]


def attention(
    call: GridParts, q: Array, own: Array | None, k: Array, v: Array, seen: Surroundings, mask: Array | None,
    chunk_size: int | None, *, return_lse: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the output and the log-sum-exp of scaled queries."""
    grids, (spans, bias_spans) = call.grids, call.spans
    axes = []
    for axis in grids.axes:
        back, ahead = (-1 if side is None else side for side in seen.reach(axis))
        size = 0 if seen.neighborhood is None else seen.neighborhood[axis]
        places = (grids.queries[axis], grids.keys[axis], grids.offset[axis], grids.q_step[axis], grids.k_step[axis])
        axes += [*places, back, ahead, size]
    of_spans = []
    for span in (*spans, *(bias_spans or ())):
        of_spans += [span.left, span.right, BEYOND.index(span.beyond)]
    arrays = [q, k, v, own, mask, call.rel_bias, call.prefix_bias, *call.tables]
    numbers = [*call.prefix, 0 if chunk_size is None else chunk_size, int(return_lse)]
    return _OPERATOR(arrays, axes, of_spans, numbers)


def _parts(
    arrays: Sequence[Any], axes: Layout, spans: Layout, numbers: Layout, *, xp: Namespace
) -> Iterator[tuple[slice, Array, Array]]:
    """Reassemble a call, and attend with some queries at a time."""
    q, k, v, own, mask, rel_bias, prefix_bias, *tables = arrays
    *places, back, ahead, sizes = (tuple(axes[which::PER_AXIS]) for which in range(PER_AXIS))
    sides = tuple((None if one < 0 else one, None if two < 0 else two) for one, two in zip(back, ahead, strict=True))
    window = None if {*sides} == {(None, None)} else sides
    seen = Surroundings(neighborhood=sizes) if sizes[0] else Surroundings(window=window)
    found = tuple(Span(spans[at], spans[at + 1], BEYOND[spans[at + 2]]) for at in range(0, len(spans), 3))
    of_tables, of_bias = found[: len(sizes)], found[len(sizes) :]
    queries, keys, offset, q_step, k_step = places
    grids = Grids(queries, keys, offset, q_step, k_step, (), ())
    call = GridParts(grids, tuple(tables), (of_tables, of_bias), rel_bias, tuple(numbers[:2]), prefix_bias)
    return call.parts(q, own, k, v, seen, mask, 1.0, numbers[2] or None, xp=xp)


_OPERATOR = OperatorInParts("grid_attention", _parts)
